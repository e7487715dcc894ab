"""A segment's place in the prefix tree. The tree alone changes it."""

from .segment import Key, Segment


class Stem:
    __slots__ = ("_alike", "_path", "born", "children", "held", "owner", "parent", "pins", "segment", "used")

    def __init__(self, segment: Segment, parent: "Stem | None", owner: Key, now: float) -> None:
        self.segment = segment
        self.parent = parent
        self.owner = owner
        self.children: dict[Key, Stem] = {}  # by the key of their first page
        self._alike: dict[int, dict[Key, Stem]] = {}  # the same, by their first token: there may be thousands behind a system prompt
        self.pins = 0
        self.held = 0  # why it must stay: it is pinned, and each child that must stay counts as well
        self.born = self.used = now
        self._path: tuple[Segment, ...] | None = None

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.segment.first + len(self.segment)

    def adopt(self, child: "Stem") -> None:
        key = child.segment.keys[0]
        self.children[key] = self._alike.setdefault(child.segment.tokens[0], {})[key] = child

    def disown(self, child: "Stem") -> None:
        key, first = child.segment.keys[0], child.segment.tokens[0]
        del self.children[key], self._alike[first][key]
        if not self._alike[first]:
            del self._alike[first]

    def beginning(self, token: int) -> list["Stem"]:
        """The children that begin with a token."""
        alike = self._alike.get(token)
        return list(alike.values()) if alike is not None else []

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
