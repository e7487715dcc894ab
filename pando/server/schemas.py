"""The schemas that clients registered, each owner's for itself, and those of the operator, which everyone may use."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import RLock

from ..engine.schemas import Schemas
from ..errors import InputError, InvalidOption, PandoError
from ..markup.binding import Bound
from ..markup.pml import Element, parse
from ..markup.prompt import prompt_schema
from ..markup.schema import Schema
from .limits import MAX_HELD_BYTES, MAX_PML_BYTES, MAX_SCHEMAS

BEGINNING = 1024  # characters of a message in which its schema must be named
PROMPT = re.compile(r"""\ufeff?\s*<prompt\s(?:[^<>]*?\s)?schema\s*=\s*(?:"([^"<>]*)"|'([^'<>]*)')""")
ALONE = re.compile(r"<prompt[^<>]*/>|<prompt[^<>]*(?<!/)>(?:(?!</?prompt[\s/>]).)*+</prompt\s*>", re.DOTALL)  # from one tag to the other
OF_PROMPTS = re.compile(rb"(?:\xef\xbb\xbf)?(?:\s++|<!--.*?-->)*+<prompt[\s/>]", re.DOTALL)  # how a file of them begins


class UnknownSchema(PandoError):
    def __init__(self, name: str) -> None:
        super().__init__(f"there is no schema {name[:80]!r}; GET /v1/schemas lists those there are")


class NotYours(PandoError):
    """Only the operator may change it."""


class TooManySchemas(InputError):
    pass


class Holdings:
    """`make` makes the schemas of one owner. Whatever a client may call is safe in any thread, but for `add`: one at a time."""

    def __init__(self, make: Callable[[], Schemas]) -> None:
        self._make = make
        self.common = make()
        self._owned: dict[bytes, Schemas] = {}
        self._sizes: dict[tuple[bytes, str], int] = {}  # bytes of PML
        self._held: dict[tuple[bytes, str], int] = {}  # bytes beside it
        self._asked = Counter[tuple[bytes, str]]()  # how often each was registered
        self._lock = RLock()  # what is counted is what is in the libraries

    # ---- the operator's

    def load(self, files: tuple[str, ...], directory: str | None) -> list[Schema]:
        """Registers files for everyone, and whatever schemas a directory has. `src` is read below the file's directory."""
        return [self.common.add(element, directory=path.parent) for path, element in read(files, directory)]

    # ---- a client's

    def add(self, owner: bytes, pml: bytes, repair: float | None = None) -> Schema:
        """Registers a schema: one that is here already, with the same content, is the one that is here."""
        element = parse(pml, "schema")
        name, own = element.attributes.get("name", "").strip(), self._of(owner)
        if self.common.library.get(name) is not None:  # a name of the operator's is everyone's
            if repair is not None:
                raise NotYours(f"the schema {name!r} was registered by the operator, for everyone; set repair in your prompts instead")
            return self.common.add(element)
        known = own.library.get(name)
        if known is None:
            self._check_room(owner, len(own.library), len(pml))
        made = own.add(element, repair=repair)
        with self._lock:
            if own.library.get(name) is made:  # otherwise it was removed meanwhile
                if made is not known:
                    self._check_held(own, owner, made)
                    self._sizes[owner, name], self._held[owner, name] = len(pml), made.held
                self._asked[owner, name] += 1
        return made

    def undo(self, owner: bytes, made: Schema) -> None:
        """Takes back a registration. With the last of them the schema goes, unless somebody has used it."""
        own, name = self._of(owner), made.name
        with self._lock:
            if own.library.get(name) is made:
                self._asked[owner, name] -= 1
                if not self._asked[owner, name] and not own.uses(made):
                    self.remove(owner, name)

    def _check_room(self, owner: bytes, count: int, size: int) -> None:
        total = size + _total(self._sizes, owner)
        if count >= MAX_SCHEMAS:
            raise TooManySchemas(f"{count} schemas are registered, the most that one API key may have; delete one first")
        if total > MAX_PML_BYTES:
            raise TooManySchemas(
                f"the schemas of one API key may have {MAX_PML_BYTES >> 20} MiB together, and with this one they would have "
                f"{total / 2**20:.1f}; delete one first"
            )

    def _check_held(self, own: Schemas, owner: bytes, made: Schema) -> None:
        """Only once it is made is it known how much it takes; what is too much is not kept."""
        if (total := made.held + _total(self._held, owner)) > MAX_HELD_BYTES:
            own.remove(made.name)
            raise TooManySchemas(
                f"what texts in schemas of one API key are encoded after, and their params, may take {MAX_HELD_BYTES >> 20} MiB, and with "
                f'this one they would take {total / 2**20:.1f}; delete one first, use encode="opening", or shorter params'
            )

    def remove(self, owner: bytes, name: str) -> None:
        """Prompts that are being answered finish."""
        with self._lock:
            if not self._of(owner).remove(name):
                if self.common.library.get(name) is not None:
                    raise NotYours(f"the schema {name!r} was registered by the operator, for everyone; only the operator can remove it")
                raise UnknownSchema(name)
            self._sizes.pop((owner, name), None)
            self._held.pop((owner, name), None)
            self._asked.pop((owner, name), None)

    def find(self, owner: bytes, name: str) -> tuple[Schemas, Schema]:
        for schemas in (self._of(owner), self.common):
            if (found := schemas.library.get(name)) is not None:
                return schemas, found
        raise UnknownSchema(name)

    def whose(self, owner: bytes, schema: Schema) -> Schemas:
        """Where a schema is, or was."""
        return self.common if self.common.library.get(schema.name) is schema else self._of(owner)

    def each(self, owner: bytes) -> Iterator[tuple[Schemas, Schema]]:
        for schemas in (self.common, self._of(owner)):
            yield from ((schemas, schema) for schema in schemas.library)

    def bind(self, owner: bytes, pml: str, called: str = "prompt") -> tuple[Bound, float]:
        """A prompt, and what of it is repaired if it does not say. `called`: where something is wrong with it."""
        element = parse(pml, called)
        schemas = self._whose(owner, element)
        schema, bound = schemas.bind(element)
        return bound, schemas.repair(schema)

    def tokens(self, owner: bytes, pml: str) -> list[int]:
        """Of a prompt that is not asked for, and so is no use of anything."""
        element = parse(pml, "prompt")
        _, bound = self._whose(owner, element).library.bind(element)
        return [token for run in bound.runs for token in run.tokens]

    def _whose(self, owner: bytes, prompt: Element) -> Schemas:
        """Whichever has the schema of a prompt, or something like it."""
        name, own = prompt_schema(prompt), self._of(owner)
        is_common = own.library.get(name) is None and (self.common.library.get(name) is not None or not len(own.library))
        return self.common if is_common else own

    def is_prompt(self, owner: bytes, text: str) -> bool:
        """Whether a text alone is a prompt in PML: it begins as one, and this owner has its schema or it is nothing else."""
        known = any(schemas.library.get(_named(text)) is not None for schemas in (self._of(owner), self.common))
        return known or is_element(text)

    def _of(self, owner: bytes) -> Schemas:
        if (found := self._owned.get(owner)) is None:
            found = self._owned.setdefault(owner, self._make())
        return found


def _total(sizes: dict[tuple[bytes, str], int], owner: bytes) -> int:
    return sum(size for (whose, _), size in list(sizes.items()) if whose == owner)


def read(files: tuple[str, ...], directory: str | None) -> Iterator[tuple[Path, Element]]:
    """The operator's schemas as they are written: what is wrong with that is known before there is a model."""
    if directory is not None and not Path(directory).is_dir():
        raise InvalidOption(f"schema_dir: {directory} is not a directory; name one with PML files")
    found = sorted(Path(directory).glob("*.pml")) if directory is not None else []
    for path in (*map(Path, files), *found):
        try:
            pml = path.read_bytes()
        except OSError as error:
            raise InvalidOption(f"schema: {path} cannot be read ({error.strerror}); name a PML file") from error
        if path not in found or not OF_PROMPTS.match(pml):  # prompts may well lie beside their schemas, several in a file
            yield path, parse(pml, str(path))


def is_element(text: str) -> bool:
    """Whether a text is one <prompt schema="..."> from its first character to its last, sound or not; blanks aside."""
    return bool(_named(text)) and ALONE.fullmatch(text.removeprefix("\ufeff").strip()) is not None


def _named(text: str) -> str:
    """The schema of a text that begins as a prompt in PML; empty where it does not."""
    found = PROMPT.match(text[:BEGINNING])
    return (found[1] or found[2] or "").strip() if found else ""
