"""Who may have the oldest part of a prompt dropped: a request says it, or its session's last one that did, or the server's option."""

from collections import OrderedDict
from threading import Lock
from typing import Literal

Choice = Literal["auto", "disabled"]

MAX_SESSIONS = 4096


class Overflow:
    """Every method may be called from any thread."""

    def __init__(self, default: Choice) -> None:
        self._default = default
        self._sessions: OrderedDict[tuple[bytes, str], Choice] = OrderedDict()
        self._lock = Lock()

    def allows(self, asked: Choice | None, salt: bytes, session: str | None) -> bool:
        """Whether a prompt that does not fit may be truncated."""
        if session is None:
            return (asked or self._default) == "auto"
        with self._lock:
            choice = asked or self._sessions.get((salt, session), self._default)
            if choice != self._default or (salt, session) in self._sessions:
                self._sessions[salt, session] = choice
                self._sessions.move_to_end((salt, session))
            while len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return choice == "auto"
