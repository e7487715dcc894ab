"""Kernels in C run on all threads; Triton's run without a GPU: in its interpreter."""

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def threads(all_threads: None) -> None: ...


@pytest.fixture
def few_threads(threads: None) -> None:
    """For what depends on their number, on a machine that has many, too."""
    torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture(scope="module")
def interpreted() -> Iterator[None]:
    """As NumPy wants it since 2.4: an array of one element is no number by itself. And without what the interpreter does over and over."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            from triton.runtime import interpreter

            once = interpreter._patch_lang_tensor

            def with_index(tensor: type, scope: object) -> None:
                once(tensor, scope)
                scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

            patch.setattr(interpreter, "_patch_lang_tensor", with_index)
            hasten(interpreter, patch)
        yield


@pytest.fixture(scope="module")
def gpu(interpreted: None) -> ModuleType:
    from pando.kernels import gpu

    return gpu


def hasten(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """The language is replaced once for each module whose functions a launch calls, not again at each call of one of them; and the table
    of NumPy's types is not made again for each operation. That is a third of the time."""
    launch, replace, numpy_type = interpreter.GridExecutor.__call__, interpreter._patch_lang, interpreter._get_np_dtype
    remembered = functools.cache(numpy_type)
    modules: set[int] = set()  # of the launch that runs

    def launched(self: object, *arguments: object, **options: object) -> None:
        modules.clear()
        launch(self, *arguments, **options)

    def replaced(function: Callable[..., object]) -> object:
        module = id(function.__globals__)
        if module in modules:
            return interpreter._LangPatchScope()  # of nothing
        modules.add(module)
        return replace(function)

    def looked_up(kind: Any) -> object:
        element = kind.scalar
        return numpy_type(element) if element.is_ptr() else remembered(element)  # addresses cannot be looked up, and need no table

    patch.setattr(interpreter.GridExecutor, "__call__", launched)
    patch.setattr(interpreter, "_patch_lang", replaced)
    patch.setattr(interpreter, "_get_np_dtype", looked_up)
    hasten_types(patch)


def hasten_types(patch: pytest.MonkeyPatch) -> None:
    """Types of the same elements and shape are one, and what a tensor knows of its type is found out once. That is half of the time."""
    from triton.language import core

    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    types, facts = dict[Any, dict[str, Any]](), dict[int, dict[str, Any]]()

    def type_of(self: Any, element: Any, shape: Any) -> None:
        key = str(element), tuple([n.value if isinstance(n, core.constexpr) else n for n in shape])
        if key not in types:
            make_type(self, element, shape)
            types[key] = vars(self)
        self.__dict__ = types[key]

    def tensor_of(self: Any, handle: object, kind: Any) -> None:
        known = id(vars(kind)) if kind.is_block() else 0  # of which `types` keeps each; a scalar's shape is none
        if known not in facts:
            make_tensor(self, handle, kind)
            facts[known] = {"shape": self.shape, "numel": self.numel}
        vars(self).update(facts[known], handle=handle, type=kind, dtype=kind.scalar)

    patch.setattr(core.block_type, "__init__", type_of)
    patch.setattr(core.tensor, "__init__", tensor_of)
