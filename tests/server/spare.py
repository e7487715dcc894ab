"""What `pando serve` imports takes longer than what most tests ask of it: a process imports it once, and servers are forks of it."""

import itertools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection

import gguf  # noqa: F401
import huggingface_hub  # noqa: F401
import jinja2.sandbox  # noqa: F401
import uvloop  # noqa: F401

from pando.cli import main
from pando.engine.loop import EngineLoop  # noqa: F401
from pando.kernels import native
from pando.model.load import Model  # noqa: F401
from pando.server.serve import serve  # noqa: F401

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])
STICKS, STUCK = "TESTS_STICKS_AFTER", "in the middle of a file"


def run(words: list[str], environment: Mapping[str, str], output: Connection, errors: Connection) -> None:
    """In the fork: what `python -m pando` does."""
    for told, number in ((output, 1), (errors, 2)):
        os.dup2(told.fileno(), number)
        told.close()
    # those that are there know what was behind these numbers before
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    native.Dense.measure = lambda *_: native.Dense()  # as in the tests: which way is the fastest here decides nothing
    if STICKS in environment:
        stick(int(environment[STICKS]))
    raise SystemExit(main(words))


def stick(after: int) -> None:
    """So many pages are written, and of the next one half: it says so, and stays there."""
    sync, pages = os.fdatasync, itertools.count()

    def stuck(descriptor: int) -> None:
        if next(pages) >= after:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            print(STUCK, file=sys.stderr)
            time.sleep(3600)
        sync(descriptor)

    os.fdatasync = stuck


class Fork:
    """As `subprocess` has a process."""

    def __init__(self, words: list[str], environment: Mapping[str, str]) -> None:
        (output, told), (errors, wrong) = FORKS.Pipe(duplex=False), FORKS.Pipe(duplex=False)
        self._process = FORKS.Process(target=run, args=(words, environment, told, wrong))
        self._process.start()
        for given in (told, wrong):  # it has its own: the last one that is closed ends what is read
            given.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(end.fileno())) for end in (output, errors))
        for end in (output, errors):
            end.close()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float) -> int:
        self._process.join(seconds)
        code = self._process.exitcode
        assert code is not None, "it goes on"
        return code

    def send_signal(self, sign: signal.Signals) -> None:
        assert self._process.pid is not None
        if self.poll() is None:
            os.kill(self._process.pid, sign)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
