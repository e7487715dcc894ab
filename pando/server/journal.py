"""The journal: one line for each thing that happened, a JSON object, or plain text where a person is watching.

What clients send ends up in it, so nothing of theirs may begin a line or steer a terminal; and it may never be why a request fails.
"""

import json
import logging
import re
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import TextIO

from ..config import LogLevel, ServerConfig

LEVELS: dict[LogLevel, int] = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
PRIVATE = frozenset({"prompt", "messages", "answer"})  # fields with words of people: only where the configuration asks for them
REQUEST_ID = re.compile("[A-Za-z0-9._-]{1,128}")
PLAIN = re.compile("[A-Za-z0-9._/:@+-]+")  # needs no quotes in a line of text


def request_id(given: str | None) -> str:
    """The client's own x-request-id where it is harmless, otherwise a new one."""
    return given if given is not None and REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


class Journal:
    def __init__(
        self,
        stream: TextIO,
        level: LogLevel = "info",
        *,
        requests: bool = True,
        prompts: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.level = level
        self._stream = stream
        self._requests = requests
        self._prompts = prompts
        self._clock = clock
        self._lock = threading.RLock()  # re-entrant: a signal may interrupt a line with another
        self._held: list[str] | None = None  # lines that may never be wanted

    @classmethod
    def from_config(cls, config: ServerConfig, stream: TextIO) -> "Journal":
        return cls(stream, config.log_level, requests=not config.disable_log_requests, prompts=config.log_prompts)

    def info(self, event: str, request_id: str = "", **fields: object) -> None:
        self.write("info", event, request_id, fields)

    def warning(self, event: str, request_id: str = "", **fields: object) -> None:
        self.write("warning", event, request_id, fields)

    def error(self, event: str, request_id: str = "", **fields: object) -> None:
        """`exception=error` among the fields shows where it came from."""
        self.write("error", event, request_id, fields)

    def request(self, request_id: str, **fields: object) -> None:
        """The one line of a request, where they are wanted."""
        if self._requests:
            self.write("info", "request", request_id, fields)

    def hold(self) -> None:
        """Keeps back what only tells of progress, unless every detail is asked for."""
        self._held = [] if LEVELS[self.level] > LEVELS["debug"] else None

    def release(self) -> None:
        """Writes what was kept back, and keeps nothing back any more."""
        with self._lock:
            held, self._held = self._held, None
            for line in held or ():
                self._put(line)

    def write(self, level: LogLevel, event: str, request_id: str, fields: Mapping[str, object]) -> None:
        if LEVELS[level] < LEVELS[self.level]:
            return
        try:
            head = {"time": _moment(self._clock()), "level": level, "event": event} | ({"request_id": request_id} if request_id else {})
            shown = {name: _plain(value) for name, value in fields.items() if self._prompts or name not in PRIVATE}
            record = head | shown | head  # these come first, and no field poses as one of them
            line = _as_text(head, shown) if self._stream.isatty() else json.dumps(record)
            with self._lock:
                if self._held is not None and LEVELS[level] < LEVELS["warning"]:
                    self._held.append(line)
                else:
                    self._put(line)
        except Exception:  # an object that cannot be shown: there is nobody to tell
            pass

    def _put(self, line: str) -> None:
        with suppress(Exception):  # a full disk, a closed stream
            self._stream.write(line + "\n")
            self._stream.flush()


class Intake(logging.Handler):
    """What libraries log, into the journal."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self.journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        try:
            fields: dict[str, object] = {"message": record.getMessage()}
        except Exception:
            fields = {"message": str(record.msg)}  # its arguments do not fit it
        if record.exc_info and record.exc_info[1]:
            fields["exception"] = record.exc_info[1]
        level: LogLevel = next((name for name, least in reversed(LEVELS.items()) if record.levelno >= least), "debug")
        self.journal.write(level, record.name.split(".")[0], "", fields)


def logging_config(journal: Journal) -> dict[str, object]:
    """For `logging.config.dictConfig`, or uvicorn's log_config: the libraries under the server write into the journal."""
    heard = {"handlers": ["journal"], "level": LEVELS[journal.level], "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "handlers": {"journal": {"()": lambda: Intake(journal)}},
        "loggers": {
            "pando": {**heard, "propagate": True},  # whoever embeds the server hears it, too
            "uvicorn": heard,
            "asyncio": heard,
            "opentelemetry": heard,
            "uvicorn.access": {"handlers": [], "level": logging.CRITICAL, "propagate": False},  # each request has its line already
        },
    }


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _plain(value: object) -> object:
    """As JSON can say it."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return round(value, 6) if abs(value) < float("inf") else str(value)  # neither NaN nor infinity is JSON
    if isinstance(value, BaseException):
        return "".join(traceback.format_exception(value)).rstrip()
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return str(value)


def _as_text(head: Mapping[str, str], fields: Mapping[str, object]) -> str:
    """`time level event id name=value ...`, and below it a traceback, indented: no line but the journal's own begins at the margin."""
    words = [word if PLAIN.fullmatch(word) else json.dumps(word) for word in head.values()]
    words += [f"{name}={_word(value)}" for name, value in fields.items() if name != "exception"]
    trace = str(fields["exception"]).splitlines() if "exception" in fields else []
    return "\n".join([" ".join(words), *("    " + json.dumps(line)[1:-1].replace('\\"', '"') for line in trace)])


def _word(value: object) -> str:
    return value if isinstance(value, str) and PLAIN.fullmatch(value) else json.dumps(value)
