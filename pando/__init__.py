"""Pando: an inference engine that never computes, stores or reads the same context twice.

The public names load on first use, so that `import pando` and `pando --help` cost no torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine.llm import LLM
    from .engine.request import CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams, Truncation
    from .engine.schemas import Prompt
    from .errors import PandoError

__version__ = "0.1.0.dev0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "PandoError",
    "Prompt",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "Truncation",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name == "LLM":
        from .engine.llm import LLM

        return LLM
    if name == "Prompt":
        from .engine.schemas import Prompt

        return Prompt
    if name == "PandoError":
        from .errors import PandoError

        return PandoError
    if name in ("CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutputsParams", "Truncation"):
        from .engine import request

        return getattr(request, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
