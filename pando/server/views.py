"""What clients get beside answers: models, tokens, health, and the state of the cache."""

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict

from ..engine.schemas import State
from ..markup.outline import Encode, Layout, Order
from .replies import PinReply


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: Annotated[str, Field(description="The id again, for clients that ask for it by this name.")]
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


# ---- schemas


class SchemaCard(TypedDict):
    name: str
    object: Literal["schema"]
    digest: Annotated[str, Field(description="Names its content; comments are no content.")]
    source: Annotated[Literal["client", "operator"], Field(description="Who registered it; the operator's is everyone's.")]
    layout: Layout
    encode: Encode
    order: Order
    repair: Annotated[float, Field(description="The share of module tokens that are computed again in prompts that do not say.")]
    tokens: Annotated[int, Field(description="Of all modules, without scaffolds.")]
    bytes: Annotated[int, Field(description="That all of it takes in the cache, once it is encoded; in whole pages.")]
    uses: Annotated[int, Field(description="Prompts that were made from it.")]


class ModuleView(TypedDict):
    path: Annotated[str, Field(description="In parentheses: text outside of modules.")]
    encode: Encode
    tokens: Annotated[int, Field(description="Of its own text, without what is nested in it.")]
    bytes: int
    state: State
    uses: Annotated[int, Field(description="Prompts that imported it.")]


class ScaffoldView(TypedDict):
    modules: list[str]
    tokens: Annotated[int, Field(description="That are stored once more, because they are also encoded together.")]
    bytes: Annotated[int, Field(description="That this takes beside the single modules.")]


class SchemaView(SchemaCard):
    modules: list[ModuleView]
    truncated: Annotated[bool, Field(description="Whether there are more modules than are listed.")]
    scaffolds: list[ScaffoldView]


class SchemaList(TypedDict):
    object: Literal["list"]
    data: list[SchemaCard]


class DeletedSchema(TypedDict):
    name: str
    deleted: Literal[True]


def model_card(name: str, created: int, max_model_len: int) -> ModelCard:
    return {"id": name, "object": "model", "created": created, "owned_by": "pando", "root": name, "max_model_len": max_model_len}
