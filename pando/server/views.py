"""What clients get beside answers: models, tokens, health, and the state of the cache."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict

from .replies import PinReply


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: Annotated[int, Field(description="Tokens one request may have, prompt and answer together.")]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeReply(TypedDict):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeReply(TypedDict):
    prompt: str


class Health(TypedDict):
    status: Literal["ok"]


class Ready(TypedDict):
    status: Literal["ready", "loading", "draining", "failed"]


class Version(TypedDict):
    version: str


class PagesView(TypedDict):
    size: Annotated[int, Field(description="Tokens in a page.")]
    total: int
    in_use: Annotated[int, Field(description="By requests and by what is cached.")]
    cached: int
    pinned: int


class SegmentView(TypedDict):
    key: Annotated[str, Field(description="The first digits of it.")]
    parent: Annotated[str | None, Field(description="The segment it continues; null at the beginning of prompts.")]
    tokens: int
    first: Annotated[int, Field(description="Its first token's place in the prompt.")]
    readers: Annotated[int, Field(description="Running requests that read it.")]
    tier: Literal["device", "host", "disk"]
    age_seconds: float
    idle_seconds: Annotated[float, Field(description="Since it was last used.")]
    pins: int


class CacheView(TypedDict):
    pages: PagesView
    segments: list[SegmentView]
    truncated: Annotated[bool, Field(description="Whether there are more segments than are listed.")]


class WarmReply(TypedDict):
    tokens: Annotated[int, Field(description="Of the prompt.")]
    cached_tokens: Annotated[int, Field(description="Of them, those that were there already.")]
    pin: Annotated[PinReply | None, Field(description="Where a ttl was given.")]


class UnpinReply(TypedDict):
    id: str
    unpinned: Annotated[bool, Field(description="False where there was no such pin, or no longer.")]


def model_list(names: Sequence[str], created: int, max_model_len: int) -> ModelList:
    cards: list[ModelCard] = [
        {"id": name, "object": "model", "created": created, "owned_by": "pando", "max_model_len": max_model_len} for name in names
    ]
    return {"object": "list", "data": cards}
