"""Who may have the oldest part of a prompt dropped: a request says it, or its session's last one that did, or the server's option.

What sessions say is remembered here, of the latest, and where there is a disk, beside its pages: there it outlives the process.
"""

from hashlib import sha256
from threading import Lock
from typing import TYPE_CHECKING, get_args

from ..config import TruncationChoice
from ..kv.latest import Latest
from ..store.tier import tenant_tag

if TYPE_CHECKING:
    from ..store.notes import Notes

MAX_SESSIONS = 4096
FORM = b"session 1"  # of what is noted


class Overflow:
    """Every method may be called from any thread."""

    def __init__(self, default: TruncationChoice, notes: "Notes | None" = None) -> None:
        self._default, self._notes = default, notes
        self._sessions = Latest[tuple[bytes, str], TruncationChoice](MAX_SESSIONS)
        self._lock = Lock()

    def allows(self, asked: TruncationChoice | None, salt: bytes, session: str | None) -> bool:
        """Whether a prompt that does not fit may be truncated."""
        if session is None:
            return (asked or self._default) == "auto"
        with self._lock:
            known = self._sessions.get((salt, session))
        known = known or self._noted(salt, session)
        choice = asked or known or self._default
        if known is not None or asked is not None:  # also if it is the default: the next server's may be another
            self._remember(salt, session, choice)
        return choice == "auto"

    def _remember(self, salt: bytes, session: str, choice: TruncationChoice) -> None:
        with self._lock:
            self._sessions[salt, session] = choice
            self._sessions.move_to_end((salt, session))
        if self._notes is not None:
            key = _key(salt, session)
            self._notes.keep(key, tenant_tag(salt), _sealed(key, choice))

    def _noted(self, salt: bytes, session: str) -> TruncationChoice | None:
        """What is on disk may be damaged, or anything: then it is nothing."""
        key = _key(salt, session)
        note = self._notes.find([key]).get(key) if self._notes is not None else None
        choices: tuple[TruncationChoice, ...] = get_args(TruncationChoice)
        return next((choice for choice in choices if note == _sealed(key, choice)), None)


def _key(salt: bytes, session: str) -> bytes:
    return sha256(FORM + tenant_tag(salt) + session.encode(errors="surrogatepass")).digest()


def _sealed(key: bytes, choice: TruncationChoice) -> bytes:
    return sha256(FORM + key + choice.encode()).digest()
