"""A client as lean as one can be: on a small machine its time is the server's, and what is to be measured is the server.

It streams one completion after the other over one connection, and reads what it has got only when the last byte is here.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..errors import PandoError
from .events import Events

LIMIT = 2**20  # bytes of a line


class BadReply(PandoError):
    """The server did not stream what was asked for."""


@dataclass(frozen=True)
class Streamed:
    """One answer, on the clock of `time.perf_counter`."""

    sent: float
    tokens: tuple[float, ...]  # when each arrived
    cached: int  # tokens of the prompt


class Line:
    """One connection, kept open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader, self._writer, self._host = reader, writer, host

    @classmethod
    async def open(cls, url: str) -> "Line":
        place = urlsplit(url)
        return cls(*await asyncio.open_connection(place.hostname, place.port, limit=LIMIT), place.netloc)

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def complete(self, prompt: Sequence[int], tokens: int) -> Streamed:
        """Greedy, and exactly so many tokens."""
        asked = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        # With its ids every token is an event, even one that makes no text.
        body = json.dumps({**asked, "return_token_ids": True, "stream_options": {"include_usage": True}}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        sent = time.perf_counter()
        self._writer.write(head.encode() + body)
        answered = await self._reader.readuntil(b"\r\n\r\n")
        if not answered.startswith(b"HTTP/1.1 200 ") or b"transfer-encoding: chunked" not in answered.lower():
            raise BadReply(f"the server answered {answered.splitlines()[0].decode(errors='replace')} instead of streaming; see its log")
        pieces: list[tuple[float, bytes]] = []
        while length := int(await self._reader.readline(), 16):
            piece = await self._reader.readexactly(length + 2)
            pieces.append((time.perf_counter(), piece[:-2]))
        await self._reader.readline()
        return _understood(sent, pieces, tokens)


def _understood(sent: float, pieces: Sequence[tuple[float, bytes]], tokens: int) -> Streamed:
    events, times, usage = Events(), list[float](), dict[str, Any]()
    for now, piece in pieces:
        for data in events.feed(piece):
            body = {} if data == "[DONE]" else json.loads(data)
            if "error" in body:
                raise BadReply(f"the stream ended in an error: {body['error']}")
            times += [now for choice in body.get("choices", ()) for _ in choice["token_ids"]]
            usage = body.get("usage") or usage
    if len(times) != tokens or not usage:
        raise BadReply(f"{tokens} tokens and their usage were asked for; {len(times)} came, {'with' if usage else 'without'} usage")
    return Streamed(sent, tuple(times), usage["prompt_tokens_details"]["cached_tokens"])
