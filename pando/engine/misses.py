"""Why reuse ended where it did."""

from ..kv.latest import Latest
from ..kv.segment import Key
from ..kv.tree import Match, PrefixTree
from .request import Miss
from .row import Row

TRACED = 2**16  # pages of which it is remembered which of an owner's tenants had them first


class Misses:
    def __init__(self, tree: PrefixTree, reuse: bool) -> None:
        self._tree, self._reuse = tree, reuse
        self._traced = Latest[Key, Key](TRACED)

    def tell(self, row: Row, match: Match, limit: int) -> None:
        """Anew, where a row was told before, when it was admitted and did not run."""
        if row.miss is None or row.miss is row.why:
            row.miss = row.why = self._why(row, match, limit)

    def _why(self, row: Row, match: Match, limit: int) -> Miss | None:
        """Why the rest of a prompt must be computed; None where it is new, and all that is known of it was found."""
        found, page = row.computed, (match.stem.end - row.at) // self._tree.page_size
        token = row.imported + found
        if not limit:
            return None if row.wants else Miss("too_short" if self._reuse and row.scored is None else "off", 0)
        if found >= limit:
            return None
        if row.ended in ("slow", "expired"):
            return Miss(row.ended, token)
        if page < len(row.keys) and self._tree.was_evicted(row.keys[page]):
            return Miss(row.ended or "evicted", token)
        if page < len(row.trace) and self._traced.get(row.trace[page], row.lineage.owner) != row.lineage.owner:
            return Miss("other_tenant", token)
        if found == 0:
            return None if row.wants else Miss(row.ended or "cold", 0)
        return Miss(row.ended or "diverged", token) if match.diverges and found == match.length - row.at else None

    def remember(self, row: Row) -> None:
        for key in row.trace:
            self._traced.setdefault(key, row.lineage.owner)
