"""`pando chat`: a conversation at the terminal, or over a pipe with one turn per line."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, TextIO

from .engine.request import How, SamplingParams, TokenEvent
from .errors import InvalidPrompt, PandoError, PromptTooLong, counted

if TYPE_CHECKING:
    from .engine.llm import LLM

HELP = """\
/reset         forget the conversation
/system TEXT   set the system prompt and forget the conversation; without TEXT, none
/help          this list
/exit          leave; so does Ctrl-D
Ctrl-C stops an answer and keeps what was said. A line that ends in \\ goes on in the next one."""

ENDS = {"length": "cut off at the token limit", "error": "the model computed values that are not numbers"}
HISTORY_LINES = 1000


@dataclass
class Speed:
    """What one answer cost."""

    began: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    dropped_tokens: int = 0
    how: How = "exact"

    def add(self, event: TokenEvent, now: float) -> None:
        self.first = self.first if self.tokens else now
        self.last = now
        self.tokens += 1
        self.prompt_tokens, self.cached_tokens = event.num_prompt_tokens, event.num_cached_tokens
        self.dropped_tokens = event.reuse.truncated.dropped if event.reuse.truncated is not None else 0
        self.how = event.reuse.how

    def __str__(self) -> str:
        parts = [
            f"{counted(self.prompt_tokens, 'prompt token')}, {self.cached_tokens} cached",
            f"{self.first - self.began:.2f} s to first token",
        ]
        if self.dropped_tokens:
            parts.insert(1, f"the oldest {self.dropped_tokens} dropped")
        if self.how != "exact":
            parts.append(f"approximate: {self.how}")
        if self.tokens > 1 and self.last > self.first:
            parts.append(f"{(self.tokens - 1) / (self.last - self.first):.0f} tokens/s")
        return " · ".join(parts)


@dataclass
class Conversation:
    """The turns so far, and how the next answer is made and shown."""

    llm: "LLM"
    sampling: SamplingParams
    out: TextIO
    system: str = ""
    clock: Callable[[], float] = time.perf_counter
    turns: list[dict[str, str]] = field(default_factory=list)

    def answer(self, text: str) -> bool:
        """Streams the answer to `text`; says whether it was let finish. Both are remembered unless nothing was answered."""
        asked = {"role": "user", "content": text}
        speed, said, end = Speed(self.clock()), "", None
        with stopped_by_interrupt() as stopped, contextlib.closing(self._events(asked)) as events:
            for event in events:
                speed.add(event, self.clock())
                said, end = said + event.text, event.finish_reason
                self.out.write(event.text)
                self.out.flush()
                if stopped():
                    break
        notes = [str(speed)] if speed.tokens else []
        notes += ["stopped"] if stopped() else [ENDS[end]] if end in ENDS else []
        self.out.write("\n" + dim(" · ".join(notes or ["no answer"]), self.out) + "\n")
        if said:
            self.turns += [asked, {"role": "assistant", "content": said}]
        return not stopped()

    def _events(self, asked: dict[str, str]) -> Generator[TokenEvent, None, None]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        yield from self.llm.stream_chat([*system, *self.turns, asked], self.sampling, truncation="auto")

    def command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "/reset":
            self.turns.clear()
            self.out.write("The conversation is forgotten.\n")
        elif word == "/system":
            self.system = rest.strip()
            self.turns.clear()
            self.out.write(
                "The system prompt is set; the conversation begins again.\n"
                if self.system
                else "The system prompt is removed; the conversation begins again.\n"
            )
        elif word == "/help":
            self.out.write(HELP + "\n")
        else:
            self.out.write(f"There is no command {word}; /help lists the commands. To send the line to the model, begin it with a space.\n")


def dim(text: str, out: TextIO) -> str:
    plain = not out.isatty() or "NO_COLOR" in os.environ
    return text if plain else f"\x1b[2m{text}\x1b[0m"


@contextlib.contextmanager
def stopped_by_interrupt() -> Iterator[Callable[[], bool]]:
    """Within it the first Ctrl-C only asks: a step of the engine is never torn in half. The second raises KeyboardInterrupt."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def read_turn(ask: Callable[[str], str]) -> str:
    """One turn; lines that end in a backslash are joined. Raises EOFError when there are no more."""
    line = ask("> ")
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        try:
            line = ask(". ")
        except EOFError:
            line = ""
    return "\n".join([*lines, line])


def converse(conversation: Conversation, ask: Callable[[str], str]) -> None:
    """At a terminal: errors are shown and the conversation goes on, until /exit, Ctrl-D or Ctrl-C twice."""
    out, leaving = conversation.out, False
    while True:
        try:
            text = read_turn(ask)
        except EOFError:
            out.write("\n")
            return
        except KeyboardInterrupt:
            if leaving:
                out.write("\n")
                return
            leaving = True
            out.write("\nCtrl-C again to leave.\n")
            continue
        leaving = False
        if text.strip() == "/exit":
            return
        try:
            take(conversation, text)
        except PromptTooLong as error:
            out.write(f"The conversation no longer fits: {error}\n/reset begins a new one.\n")
        except PandoError as error:
            out.write(f"{error}\n")


def read_all(conversation: Conversation, lines: IO[bytes]) -> None:
    """Over a pipe: every line is a turn, and an error or Ctrl-C ends it."""

    def ask(prompt: str) -> str:
        if not (line := lines.readline()):
            raise EOFError
        return utf8(line).rstrip("\r\n")

    with contextlib.suppress(EOFError):
        while (text := read_turn(ask)).strip() != "/exit":
            if not take(conversation, text):
                raise KeyboardInterrupt


def take(conversation: Conversation, text: str) -> bool:
    """Does what a turn asks for; says whether it was let finish."""
    if text.startswith("/"):
        conversation.command(text.rstrip())
    elif text.strip():
        return conversation.answer(utf8(text).strip())
    return True


def utf8(text: bytes | str) -> str:
    """What came from a shell or a pipe, as text. In a str, bytes that are not UTF-8 arrive as lone surrogates."""
    try:
        return (text.encode() if isinstance(text, str) else text).decode()
    except UnicodeError as error:
        raise InvalidPrompt(f"the prompt is not UTF-8 text ({error}); convert it first") from error


def chat(llm: "LLM", name: str, sampling: SamplingParams, system: str) -> None:
    conversation = Conversation(llm, sampling, sys.stdout, system)
    if not sys.stdin.isatty():
        read_all(conversation, sys.stdin.buffer)
        return
    print(dim(f"{name} · /help lists the commands, Ctrl-D leaves", sys.stdout))
    with remembered_lines(history_file()):
        converse(conversation, input)


def history_file() -> Path | None:
    """None: this user has no home."""
    state = os.environ.get("XDG_STATE_HOME", "")
    with contextlib.suppress(RuntimeError):
        return (Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state") / "pando" / "history"
    return None


@contextlib.contextmanager
def remembered_lines(file: Path | None) -> Iterator[None]:
    """Line editing with a history that outlives the process, readable by its owner alone; without readline or a writable home, none."""
    try:
        import readline
    except ImportError:
        file = None
    if file is None:
        yield
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
            file.chmod(0o600)
            readline.write_history_file(file)
            file.chmod(0o600)
