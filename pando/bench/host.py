"""A Pando server in a process of its own, for the benchmarks that are about the server itself, and what can be seen of it from outside."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import InvalidOption, PandoError
from .baseline import quiet, write_random_model

STOP_SECONDS = 60.0
SHOWN = 2000  # characters of the log of a server that has ended
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


class Gone(PandoError):
    """A server that answered no longer does."""


@dataclass(frozen=True)
class Site:
    """A running server."""

    url: str
    pid: int
    log: Path


@dataclass(frozen=True)
class Vitals:
    """What a process holds."""

    rss: int  # MiB
    threads: int
    files: int  # open descriptors


def vitals(pid: int) -> Vitals:
    process = Path("/proc") / str(pid)
    try:
        lines = (process / "status").read_text(encoding="utf-8").splitlines()
        facts = dict(line.split(":", 1) for line in lines)
        return Vitals(int(facts["VmRSS"].split()[0]) >> 10, int(facts["Threads"]), len(os.listdir(process / "fd")))
    except (OSError, KeyError) as error:
        raise Gone(f"{process} cannot be read ({error}): the server has ended, or this is not Linux, where alone it can be") from error


@contextmanager
def chosen(model: str, random_weights: bool) -> Iterator[tuple[str, list[str]]]:
    """The model, and the options that a server of it needs: one with random weights has no chat template."""
    if not random_weights:
        yield model, []
        return
    with TemporaryDirectory(prefix="pando-bench-") as folder:
        quiet()
        write_random_model(Path(folder))
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE, encoding="utf-8")
        yield folder, ["--chat-template", str(template)]


@contextmanager
def hosted(model: str, options: Sequence[str], environ: Mapping[str, str]) -> Iterator[Site]:
    """Starts it on a free port, waits until it answers, and stops it at the end; its log is there as long."""
    command = [sys.executable, "-m", "pando", "serve", model, "--host", "127.0.0.1", "--port", "0", *options]
    with TemporaryDirectory(prefix="pando-bench-") as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env={**os.environ, **environ}, text=True)
        try:
            yield Site(_address(process, log), process.pid, log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout:
                process.stdout.close()


def _address(process: "subprocess.Popen[str]", log: Path) -> str:
    for line in process.stdout or ():
        if found := re.search(r"listening on (http://\S+)", line):
            return found[1]
    raise InvalidOption(f"the server ended with status {process.wait()} before it was ready: {last_words(log)}")


def last_words(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-SHOWN:].strip() or "it said nothing"
