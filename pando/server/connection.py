"""One connection, and how long and how large the beginning of a request may be: nobody has shown a key yet, and nothing is answered."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 2**16  # bytes of the headers of one request, its address among them, and of what may follow its body
PATIENCE = 75  # seconds without a whole head; longer than proxies keep connections, so that it is them who close


class TooLong(Exception):
    """It is answered as any request that is not HTTP."""


class Connection(HttpToolsProtocol):
    """The parser below keeps whatever it is sent until it is whole, and waits for that without end."""

    _size = 0  # of the address and the headers that are whole
    _unread = 0  # bytes of which nothing has become yet
    _waiting: asyncio.TimerHandle | None = None  # for a request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._unread > MAX_HEAD:
            self.send_400_response("The headers are too long.")
        elif self._waiting is None and (self.cycle is None or self.cycle.response_complete):
            self._wait()

    def on_message_begin(self) -> None:
        self._size = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unread = 0
        self._end_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unread = 0
        super().on_message_complete()

    def _count(self, size: int) -> None:
        self._size += size
        if self._size > MAX_HEAD:
            raise TooLong

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(PATIENCE, self.timeout_keep_alive_handler)

    def _end_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
