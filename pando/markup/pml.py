"""PML text to a syntax tree in which everything knows its line and column.

The XML is Expat's to read. A document type is refused before anything in it is looked at, so there are no entities but the five, and
nothing is ever fetched. Limits hold while the tree grows, not after.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from xml.parsers import expat

from ..errors import MarkupError

_COMMENT = "\0"  # where a comment stood: XML has no such character
_BLANK = " \t\r\n"
_ADVICE = {
    expat.errors.codes[expat.errors.XML_ERROR_INVALID_TOKEN]: "write < as &lt; and & as &amp; in text, and every attribute in quotes",
    expat.errors.codes[expat.errors.XML_ERROR_UNDEFINED_ENTITY]: "there are only &lt; &gt; &amp; &quot; and &apos;",
    expat.errors.codes[expat.errors.XML_ERROR_JUNK_AFTER_DOC_ELEMENT]: "a document is one <schema> or one <prompt>",
    expat.errors.codes[expat.errors.XML_ERROR_NO_ELEMENTS]: "a document is one <schema> or one <prompt>",
    expat.errors.codes[expat.errors.XML_ERROR_SYNTAX]: "a document is one <schema> or one <prompt>",
    expat.errors.codes[expat.errors.XML_ERROR_BAD_CHAR_REF]: "XML cannot hold that character, not even by its number: remove it",
    expat.errors.codes[expat.errors.XML_ERROR_DUPLICATE_ATTRIBUTE]: "give each attribute once",
}


@dataclass(frozen=True)
class Limits:
    bytes: int = 16 << 20
    depth: int = 100
    elements: int = 100_000
    name: int = 256  # characters
    value: int = 1 << 20  # characters of an attribute


DEFAULT_LIMITS = Limits()


_LINES = re.compile(r"([^\r\n]*)(?:\r\n|\r|\n|\Z)")  # with any of the ends that XML knows


@dataclass(frozen=True, eq=False)
class Source:
    file: str
    text: str = field(repr=False)

    def wrong(self, message: str, line: int, column: int) -> MarkupError:
        start = end = 0
        for _, found in zip(range(line), _LINES.finditer(self.text), strict=False):
            start, end = found.span(1)
        return MarkupError(message, self.file, line, column, self.text[start:end])


class Place(NamedTuple):
    source: Source
    line: int
    column: int

    def wrong(self, message: str) -> MarkupError:
        return self.source.wrong(message, self.line, self.column)


class Text(NamedTuple):
    text: str  # as it is tokenized: indentation is gone
    at: Place


class Element(NamedTuple):
    name: str
    attributes: Mapping[str, str]
    children: tuple["Element | Text", ...]
    at: Place

    def wrong(self, message: str) -> MarkupError:
        return self.at.wrong(message)

    def elements(self) -> Iterator["Element"]:
        """The children that are elements, where text has no place."""
        for child in self.children:
            if isinstance(child, Element):
                yield child
            elif child.text.strip():
                raise child.at.wrong(f"text in <{self.name}>, which holds only elements; move it")


def parse(text: str | bytes, file: str = "pml", limits: Limits = DEFAULT_LIMITS) -> Element:
    """The root of a document. `file` is what errors call it."""
    decoded = _decoded(text, file, limits)
    reader = _Reader(Source(file, decoded), limits)
    try:
        reader.parser.Parse(decoded, True)
    except expat.ExpatError as error:
        raise reader.malformed(error) from None
    assert reader.root is not None
    return reader.root


def _decoded(text: str | bytes, file: str, limits: Limits) -> str:
    start = Source(file, "")
    if not isinstance(text, str | bytes):
        raise start.wrong(f"a document is text; found {type(text).__name__}", 1, 1)
    if len(text) > limits.bytes:
        raise start.wrong(f"the document has {len(text):,} bytes or more; at most {limits.bytes:,} are read", 1, 1)
    try:
        if isinstance(text, bytes):
            return text.decode("utf-8-sig")
        size = len(text.encode())
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise start.wrong(f"not UTF-8 at byte or character {error.start}: {error.reason}; save the document as UTF-8", 1, 1) from None
    if size > limits.bytes:
        raise start.wrong(f"the document has {size:,} bytes; at most {limits.bytes:,} are read", 1, 1)
    return text.removeprefix("\ufeff")


class _Open(NamedTuple):
    """An element whose end has not come."""

    name: str
    attributes: dict[str, str]
    at: Place
    preserve: bool
    children: list[Element | Text]


class _Reader:
    def __init__(self, source: Source, limits: Limits) -> None:
        self.source = source
        self.limits = limits
        self.root: Element | None = None
        self.open: list[_Open] = []
        self.elements = 0
        self.words: list[str] = []  # of the run of text that is being read
        self.words_at: Place | None = None
        self.parser = expat.ParserCreate()
        self.parser.StartElementHandler = self.start
        self.parser.EndElementHandler = self.end
        self.parser.CharacterDataHandler = self.characters
        self.parser.CommentHandler = lambda _: self.characters(_COMMENT)
        self.parser.StartDoctypeDeclHandler = self.doctype
        self.parser.ProcessingInstructionHandler = self.instruction

    def here(self) -> Place:
        return Place(self.source, self.parser.CurrentLineNumber, self.parser.CurrentColumnNumber + 1)

    def start(self, name: str, attributes: dict[str, str]) -> None:
        at, limits = self.here(), self.limits
        if self.words_at is not None:
            self.finish_text(self.words_at)
        self.elements += 1
        if self.elements > limits.elements:
            raise at.wrong(f"more than {limits.elements:,} elements; split the document")
        if len(self.open) >= limits.depth:
            raise at.wrong(f"elements are nested deeper than {limits.depth}; flatten the document")
        for word in (name, *attributes):
            if len(word) > limits.name:
                raise at.wrong(f"a name of {len(word):,} characters; at most {limits.name} are allowed")
        preserve = bool(self.open) and self.open[-1].preserve
        if attributes:
            preserve = self.checked(attributes, at, preserve)
        self.open.append(_Open(name, attributes, at, preserve, []))

    def checked(self, attributes: dict[str, str], at: Place, preserve: bool) -> bool:
        """Without what is said of white space; answers whether that is preserved."""
        for word, value in attributes.items():
            if len(value) > self.limits.value:
                raise at.wrong(f"the value of {word} has {len(value):,} characters; at most {self.limits.value:,} are allowed")
        space = attributes.pop("xml:space", None)
        if space not in (None, "preserve", "default"):
            raise at.wrong(f'xml:space is "{clipped(space)}"; it is "preserve" or "default"')
        return preserve if space is None else space == "preserve"

    def end(self, _: str) -> None:
        if self.words_at is not None:
            self.finish_text(self.words_at)
        name, attributes, at, _preserve, children = self.open.pop()
        element = Element(name, attributes, tuple(children), at)
        if self.open:
            self.open[-1].children.append(element)
        else:
            self.root = element

    def characters(self, text: str) -> None:
        if self.words_at is None:
            self.words_at = self.here()
        self.words.append(text)

    def finish_text(self, at: Place) -> None:
        raw = "".join(self.words)
        self.words, self.words_at = [], None
        if not self.open:  # a comment before the root
            return
        text = raw.replace(_COMMENT, "") if self.open[-1].preserve else undented(raw)
        if text:
            self.open[-1].children.append(Text(text, _first_visible(raw, at)))

    def doctype(self, *_: object) -> None:
        before = self.source.text.encode()[: self.parser.CurrentByteIndex + 1].decode(errors="ignore")
        start = max(0, before.rfind("<!DOCTYPE"))
        line_start = before.rfind("\n", 0, start) + 1
        at = Place(self.source, before.count("\n", 0, start) + 1, start - line_start + 1)
        raise at.wrong("a document type; PML has none, and no entities but &lt; &gt; &amp; &quot; and &apos;: remove it")

    def instruction(self, target: str, _: str) -> None:
        raise self.here().wrong(f"a processing instruction <?{clipped(target)} …?>; PML has none: remove it")

    def malformed(self, error: expat.ExpatError) -> MarkupError:
        what = expat.errors.messages[error.code]
        unclosed = expat.errors.XML_ERROR_TAG_MISMATCH, expat.errors.XML_ERROR_NO_ELEMENTS, expat.errors.XML_ERROR_UNCLOSED_TOKEN
        advice = _ADVICE.get(error.code, "see that every element is closed")
        if self.open and what in unclosed:
            last = self.open[-1]
            advice = f"<{clipped(last.name)}> of line {last.at.line} must be closed first, with </{clipped(last.name)}>"
        return self.source.wrong(f"malformed XML: {what}; {advice}", error.lineno, error.offset + 1)


def clipped(text: str | None) -> str:
    """As much of what was found as a message can bear."""
    text = text or ""
    return text if len(text) <= 60 else text[:59] + "…"


def undented(text: str) -> str:
    """Indentation is layout, not text. What stands behind a tag on its line keeps its spaces, and so does what stands before one."""
    if _COMMENT in text:  # a line that holds only comments is no line
        text = re.sub(rf"\n[ \t]*(?:{_COMMENT}[ \t]*)+(?=\n)", "", text).replace(_COMMENT, "")
    if "\n" not in text:
        return text
    if not text.strip(_BLANK):
        return ""
    first, *lines = text.split("\n")
    margin = _margin(lines)
    lines = [line[len(margin) :] if line.strip(_BLANK) else "" for line in lines]
    if not lines[-1]:
        lines.pop()
    return "\n".join([first, *lines] if first.strip(_BLANK) else lines)


def _margin(lines: list[str]) -> str:
    """The indentation that all lines share; lines of nothing but spaces have none."""
    margins = [line[: len(line) - len(line.lstrip(" \t"))] for line in lines if line.strip(_BLANK)]
    if not margins:
        return ""
    least, most = min(margins), max(margins)
    return next((least[:i] for i, char in enumerate(least) if char != most[i]), least)


def _first_visible(raw: str, at: Place) -> Place:
    """Where the first word of a run of text stands."""
    blank = raw[: len(raw) - len(raw.lstrip(_BLANK + _COMMENT))]
    if blank == raw or _COMMENT in blank:
        return at
    if "\n" not in blank:
        return at._replace(column=at.column + len(blank))
    return at._replace(line=at.line + blank.count("\n"), column=len(blank) - blank.rfind("\n"))
