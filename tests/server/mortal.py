"""Engines on one directory that are killed at any moment: `python -m tests.server.mortal FOLDER KILLS SEED`.

Torch is imported once: an engine is a fork of this process, which therefore must have no threads. Prints what was seen, as JSON.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from pando.engine.engine import Engine
from pando.engine.request import Request
from pando.kernels import native
from pando.model.load import Model

from ..tiny import greedy, run, tiny_engine, tiny_model

CONVERSATIONS, TURNS, ANSWER = 10, 3, 6
OPENING, TURN = 40, 30  # tokens; every second conversation has the same opening
PAUSE = 0.1  # seconds at most between the last thing heard of a life and its end
GIB = 2**30
STICKS = 5  # of so many lives one is killed in the middle of a file
STUCK = "it sticks"
KEPT = 160  # pages on disk, of about 200 and many others: they come and go


@dataclass
class Seen:
    kills: int = 0
    torn: int = 0  # kills that left a half-written file
    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    disk: int = 0  # tokens that came from there
    last: int = 0  # the same, of the last life, which was not cut short


class World:
    """Conversations, and what a cold run answers."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.turns: list[tuple[list[int], list[int]]] = []
        engine = tiny_engine(model, prefix_caching=False)
        for conversation in range(CONVERSATIONS):
            prompt = _words(f"opening {conversation % 2}", OPENING)
            for turn in range(TURNS):
                prompt = [*prompt, *_words(f"{conversation} {turn}", TURN)]
                self.turns.append((prompt, answer := [event.token for event in _events(engine, prompt)]))
                prompt = [*prompt, *answer]

    def engine(self, folder: Path) -> Engine:
        page = self.model.config.layers * 2 * 8 * self.model.config.kv_heads * self.model.config.head_dim * 4
        return tiny_engine(self.model, page_size=8, kv_cache_tokens=320, disk_gib=KEPT * page / GIB, disk_dir=str(folder))

    def live(self, folder: Path, seed: str, told: int, answers: int, *, sticks: bool) -> None:
        """Answers one turn after another, and writes what it answers to a pipe; or that it is in the middle of a file, and stays there."""

        def stick(descriptor: int) -> None:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.write(told, (json.dumps(STUCK) + "\n").encode())
            time.sleep(3600)

        dice, engine = random.Random(seed), self.engine(folder)
        os.fdatasync = stick if sticks else os.fdatasync
        for _ in range(answers):
            which = dice.randrange(len(self.turns))
            prompt, expected = self.turns[which]
            events = _events(engine, prompt)
            tokens = [event.token for event in events]
            fact = {"disk": events[0].reuse.tiers.get("disk", 0), "wrong": "" if tokens == expected else f"{which}: {tokens}"}
            os.write(told, (json.dumps(fact) + "\n").encode())
            run(engine, [Request("other", dice.choices(range(256), k=TURN), greedy(1))])  # so that there is always something to write
            if dice.random() < 0.2:
                engine.clear_cache()
        engine.close()


def _words(seed: str, count: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


def _events(engine: Engine, prompt: list[int]):  # type: ignore[no-untyped-def]
    return run(engine, [Request("r", prompt, greedy(ANSWER))])["r", 0]


def begin(world: World, folder: Path, seed: str, answers: int, *, sticks: bool = False) -> tuple[int, int]:
    """A life: its process, and where it tells of itself."""
    assert threading.active_count() == 1
    heard, told = os.pipe()
    if child := os.fork():
        os.close(told)
        return child, heard
    code = 1
    try:
        os.close(heard)
        world.live(folder, seed, told, answers, sticks=sticks)
        code = 0
    finally:
        os._exit(code)


def end(life: tuple[int, int], seen: Seen, after: int | None = None, pause: float = 0.0, *, sticks: bool = False) -> int:
    """Hears what it tells; answers how many tokens it had from disk. It is killed after so many answers and a pause, or when it sticks; or
    lives on."""
    child, heard = life
    kill = after is not None
    with open(heard) as lines:
        facts = [json.loads(lines.readline()) for _ in range(after or 0)]
        while sticks and STUCK not in facts:
            facts.append(json.loads(lines.readline()))
        if kill:
            time.sleep(pause)
            os.kill(child, signal.SIGKILL)
            seen.kills += 1
        facts += [json.loads(line) for line in lines]
    facts = [fact for fact in facts if fact != STUCK]
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != (-signal.SIGKILL if kill else 0):
        seen.wrong.append(f"it ended with status {status}")
    seen.answers += len(facts)
    seen.wrong += [fact["wrong"] for fact in facts if fact["wrong"]]
    disk = sum(fact["disk"] for fact in facts)
    seen.disk += disk
    return disk


def main(folder: Path, kills: int, seed: str) -> None:
    torch.set_num_threads(1)
    native.Dense.measure = lambda *_: native.Dense()  # how to attend is no life's concern: to find out takes longer than most of them
    world, seen, dice = World(tiny_model(layers=4)), Seen(), random.Random(seed)
    while seen.kills < kills:
        together = min(1 + (seen.kills % 3 == 0), kills - seen.kills)  # on one directory
        sticks = not seen.kills % STICKS  # so that some kill meets a file that is being written, however fast a disk is
        lives = [begin(world, folder, f"{seed} {seen.kills} {each}", 10_000, sticks=sticks) for each in range(together)]
        for life in lives:
            end(life, seen, dice.choice((0, 1, 2, 4)), dice.uniform(0, PAUSE), sticks=sticks)
            seen.torn += any((folder / "v1" / "making").glob("*"))
    seen.last = end(begin(world, folder, f"{seed} last", 2 * len(world.turns)), seen)
    print(json.dumps(asdict(seen)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
