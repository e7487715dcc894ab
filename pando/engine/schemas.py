"""The schemas of one engine: PML in, runs out, and what of them is in the cache."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from weakref import WeakKeyDictionary, WeakValueDictionary

from ..errors import InvalidPrompt
from ..kv.run import Run
from ..markup.binding import Bound
from ..markup.library import Library
from ..markup.outline import Encode
from ..markup.pml import Element
from ..markup.program import Prompt as Written
from ..markup.schema import Schema
from .engine import Engine
from .repair import check_share
from .request import Tenant
from .words import Words


@dataclass(frozen=True)
class Prompt:
    """A prompt in PML, made from a schema that was added before. `repair`: the share of its module tokens that are computed again, where
    they mind most that they were encoded without their neighbours; None: as the schema says. `file`: what errors call it."""

    pml: str
    repair: float | None = None
    file: str = "prompt"


State = Literal["cached", "partly cached", "not encoded", "computed with each prompt"]


@dataclass(frozen=True)
class ModuleFacts:
    path: str
    encode: Encode
    tokens: int
    bytes: int  # that its states take, or would
    state: State
    uses: int


@dataclass
class _Uses:
    prompts: int = 0
    modules: Counter[str] = field(default_factory=Counter)


class Schemas:
    """May be asked from any thread; whatever concerns the cache is asked of the engine in its own."""

    def __init__(self, engine: Engine, encoder: Callable[[Schema], None] | None = None, chat_template: str | None = None) -> None:
        self._engine, self._encoder = engine, encoder
        geometry = engine.model.decoder.geometry
        movable = geometry.freqs is not None or geometry.slopes is not None
        self.library = Library(Words(engine.model.tokenizer, chat_template), movable=movable, max_len=engine.max_len)
        self._uses = WeakKeyDictionary[Schema, _Uses]()
        self._repairs = WeakKeyDictionary[Schema, float]()  # where one was given
        self._written = WeakValueDictionary[str, Schema]()  # by their texts
        self._lock = threading.Lock()

    def add(
        self,
        pml: str | bytes | Element,
        *,
        file: str = "schema",
        directory: str | Path | None = None,
        eager: bool = False,
        repair: float | None = None,
    ) -> Schema:
        """Registers a schema; one that is here already, with the same content, is the one that is here. `directory`: `src` names files
        below it, and none where it is None. `eager`: its modules are encoded now, and not when a prompt first asks for them. `repair`: of
        prompts that do not say; without it, a schema that is here keeps the one it has, and a new one has 0."""
        share = None if repair is None else check_share(repair)
        here = set(self.library)
        schema = self.library.add(pml, file=file, directory=None if directory is None else Path(directory))
        if share is not None:
            self._repairs[schema] = share
        if eager and self._encoder is not None:
            try:
                self._encoder(schema)
            except BaseException:  # it cannot be encoded, or somebody did not wait for that: whoever is told so need not remove it
                if schema not in here:
                    self.remove(schema.name)
                raise
        return schema

    def remove(self, name: str) -> bool:
        """Prompts that are being answered finish; what is cached goes when the room is needed."""
        return self.library.remove(name) is not None

    def __getitem__(self, name: str) -> Schema:
        found = self.library.get(name)
        if found is None:
            raise InvalidPrompt(f"there is no schema {name[:60]!r}; add it first")
        return found

    def names(self) -> list[str]:
        return [schema.name for schema in self.library]

    def bind(self, pml: str | bytes | Element, *, file: str = "prompt") -> tuple[Schema, Bound]:
        schema, bound = self.library.bind(pml, file=file)
        with self._lock:
            uses = self._uses.setdefault(schema, _Uses())
            uses.prompts += 1
            uses.modules.update(bound.imported)
        return schema, bound

    def made(self, written: Written) -> Prompt:
        """Of a call of a program, whose schema is registered, if it is not yet."""
        known = self._written.get(written.schema)
        if known is None or self.library.get(known.name) is not known:
            self._written[written.schema] = self.add(written.schema)
        return Prompt(written.pml)

    def parts(self, prompt: Prompt) -> tuple[tuple[int, ...], tuple[Run, ...], int | None, float]:
        """A prompt as a request takes it: the new words at its end, what stands before them, their position, and its repair."""
        schema, bound = self.bind(prompt.pml, file=prompt.file)
        repair = self.repair(schema) if prompt.repair is None else prompt.repair
        return *bound.parts, repair

    def repair(self, schema: Schema) -> float:
        """Of prompts made from it that do not say."""
        return self._repairs.get(schema, 0.0)

    def uses(self, schema: Schema) -> int:
        return self._uses.get(schema, _Uses()).prompts

    def facts(self, schema: Schema, tenant: Tenant, which: slice = slice(None)) -> list[ModuleFacts]:
        """In the engine's thread. `which`: of the modules, since there may be very many."""
        uses = self._uses.get(schema, _Uses()).modules
        return [
            ModuleFacts(
                part.path, part.encode, part.tokens, self._engine.bytes_of(part.runs),
                self._state(part.runs, part.cached, tenant), uses.get(part.path, 0),
            )
            for part in schema.modules[which]
        ]  # fmt: skip

    def _state(self, runs: Sequence[Run], cached: bool, tenant: Tenant) -> State:
        if not cached:
            return "computed with each prompt"
        held = [self._engine.holds(run, tenant) for run in runs]
        return "cached" if all(held) else "partly cached" if any(held) else "not encoded"
