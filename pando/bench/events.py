"""Server-sent events, as they arrive in pieces."""

import re
from collections.abc import Iterator

_LINE_END = re.compile(rb"\r\n|\r|\n")


class Events:
    """Gives the data of each event as soon as its last byte is here. Names, ids and comments mean nothing to a load test."""

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[str] = []
        self._half = False  # the last piece ended in a carriage return, and the line feed may be in the next one

    def feed(self, piece: bytes) -> Iterator[str]:
        if not piece:
            return
        if self._half and piece.startswith(b"\n"):
            piece = piece[1:]
        self._half = piece.endswith(b"\r")
        *lines, self._tail = _LINE_END.split(self._tail + piece)
        for line in lines:
            if not line and self._data:
                yield "\n".join(self._data)
                self._data = []
            elif line:
                self._take(line.decode("utf-8", errors="replace"))

    def _take(self, line: str) -> None:
        name, _, value = line.removeprefix("\ufeff").partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
