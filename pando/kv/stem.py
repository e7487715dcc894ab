"""A segment's place in the prefix tree. The tree alone changes it."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from .segment import Key, Segment, Tokens, shared_length

Page = tuple[int, ...]  # its tokens


class Stem:
    __slots__ = ("_openings", "_path", "born", "children", "held", "owner", "parent", "pins", "segment", "used")

    def __init__(self, segment: Segment, parent: "Stem | None", owner: Key, now: float) -> None:
        self.segment = segment
        self.parent = parent
        self.owner = owner
        self.children: dict[Key, Stem] = {}  # by the key of their first page
        # Their first pages, of each owner, in the order of their tokens: there may be thousands behind a system prompt, and those that
        # begin most like a given one are its neighbours.
        self._openings: dict[Key, list[tuple[Page, Key]]] = {}
        self.pins = 0
        self.held = 0  # why it must stay: it is pinned, and each child that must stay counts as well
        self.born = self.used = now
        self._path: tuple[Segment, ...] | None = None

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.segment.first + len(self.segment)

    @property
    def opening(self) -> Page:
        """Its first page."""
        assert isinstance(self.segment.tokens, Tokens)
        return self.segment.tokens.pages[0]

    def adopt(self, child: "Stem") -> None:
        key = child.segment.keys[0]
        if key not in self.children:
            insort(self._openings.setdefault(child.owner, []), (child.opening, key))
        self.children[key] = child

    def disown(self, child: "Stem") -> None:
        key, pages = child.segment.keys[0], self._openings[child.owner]
        del self.children[key], pages[bisect_left(pages, (child.opening, key))]
        if not pages:
            del self._openings[child.owner]

    def has_of(self, owner: Key) -> bool:
        return owner in self._openings

    def nearest(self, owner: Key, tokens: Page) -> list["Stem"]:
        """Of an owner's children that begin with the same token, the one that begins like these for longest; and perhaps another."""
        pages = self._openings.get(owner, [])
        place = bisect_left(pages, (tokens,))
        return [self.children[key] for page, key in pages[max(0, place - 1) : place + 1] if page[:1] == tokens[:1]]

    def within(self, owner: Key, tokens: Page) -> Iterator["Stem"]:
        """Those whose first page is a beginning of these tokens, the longest first."""
        pages = self._openings.get(owner, [])
        while tokens:
            place = bisect_left(pages, (tokens,))
            if place < len(pages) and pages[place][0] == tokens:
                yield self.children[pages[place][1]]
            # All that stand between a shorter one and these tokens begin with it, and so does the last of them.
            tokens = tokens[: shared_length(pages[place - 1][0], tokens)] if place else ()

    def path(self, first: int = 0) -> tuple[Segment, ...]:
        """From the first segment below the root to this one, or from the one that begins at a position: the same tuple until one of them is
        another."""
        if self._path is None:
            found: list[Segment] = []
            stem = self
            while stem.parent is not None:
                found.append(stem.segment)
                stem = stem.parent
            self._path = tuple(found[::-1])
        if not self._path or self._path[0].first >= first:
            return self._path
        return tuple(segment for segment in self._path if segment.first >= first)

    def change(self, segment: Segment) -> None:
        """Takes another segment in its place. Whoever reads this stem, or one below it, reads other segments from now on."""
        self.segment = segment
        self._forget_path()

    def move(self, parent: "Stem") -> None:
        """To hang below another stem."""
        assert self.parent is not None
        self.parent.disown(self)
        self.parent = parent
        parent.adopt(self)
        self._forget_path()

    def _forget_path(self) -> None:
        self._path = None
        stack = list(self.children.values())
        while stack:
            stem = stack.pop()
            stem._path = None
            stack.extend(stem.children.values())
