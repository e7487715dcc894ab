"""A trace through a real engine: that what it says of tiers and answers is so."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pando.bench import trace
from pando.bench.conversations import Conversation, Piece, Shape, Turn, sharegpt
from pando.bench.rehearsal import Rehearsal, Small, part, rehearse, shrunk
from pando.bench.replay import Machine
from pando.errors import InvalidOption
from tests.tiny import tiny_engine, tiny_model

MACHINE = Machine(kv_bytes=1000, prefill_rate=1000, step=0.02, batch=4, gpus=1, pool=100_000)
SMALL = Small(sessions=6, longest=2048, scale=32, rows=4)
POLICY_NAMES = ("lookahead", "lru", "fifo")


def talk(arrival: float, *turns: tuple[int, int], think: float = 1.0, name: str = "a") -> Conversation:
    """Of so many tokens of question and answer."""
    context: list[Piece] = []
    made = []
    for number, (question, answer) in enumerate(turns):
        adds = Piece(f"{name}{number}".encode(), question + answer)
        made.append(Turn(tuple(context), question, answer, (adds,), think if number else 0.0))
        context.append(adds)
    return Conversation(arrival, tuple(made))


def test_every_answer_is_the_cold_one_and_tokens_add_up_to_the_prompts() -> None:
    said = sharegpt(Shape(6, rate=4, think=5, window=32768), seed=4)
    cold, *lines = rehearse(said, MACHINE, SMALL, POLICY_NAMES)
    real = [line for line in lines if not line.simulated]
    assert [line.policy for line in real] == list(POLICY_NAMES)
    assert all(line.equal == cold.turns == line.turns for line in real)
    assert (cold.device, cold.host, cold.disk, cold.computed) == (0, 0, 0, 1)
    for line in lines:
        shares = (line.device, line.host, line.disk, line.computed)
        assert min(shares) >= 0 and sum(shares) == pytest.approx(1) and line.computed < 0.9
        assert line.tokens == cold.tokens, "the same was asked"
    assert all(not sum((line.lost or {}).values()) for line in real)
    for line, simulated in zip(real, (line for line in lines if line.simulated), strict=True):
        assert simulated.computed == pytest.approx(line.computed, abs=0.02), "the same scheduler and the same store decide"


def test_what_is_in_no_pool_comes_from_the_tiers_below() -> None:
    """Six conversations take turns; the pool holds less than two of them, host memory four, the disk all."""
    said = [talk(number, (107, 6), (20, 1), think=20, name=f"{number} ") for number in range(6)]
    slow = replace(MACHINE, prefill_rate=100, batch=1)
    _, real, simulated = rehearse(said, slow, Small(scale=1, rows=1, shares=(0.01, 0.01, 1.0)), ["lru"])
    assert real.disk > 0.1 and simulated.disk > 0.1
    found = (real.device + real.host + real.disk) * real.tokens
    assert found == pytest.approx(6 * 112, abs=3), "seven pages of each first turn; questions may begin alike by chance"
    assert (simulated.device + simulated.host + simulated.disk) * real.tokens == pytest.approx(6 * 112, abs=3)
    assert simulated.disk == pytest.approx(real.disk, abs=0.05)


def test_a_second_turn_begins_with_the_first_and_its_answer() -> None:
    engine = tiny_engine(tiny_model())
    asked = Rehearsal(engine, MACHINE, [talk(0, (10, 5), (7, 3))]).run()
    first, second = asked["0.0"], asked["0.1"]
    assert second.prompt[:15] == [*first.prompt, *first.answer] and len(second.prompt) == 22
    assert second.tiers["device"] == 14, "of the last token of an answer there are no states"
    assert first.first > 0 and second.first > 0


def test_turns_come_on_the_clock_of_the_trace() -> None:
    """The second turn of the first waits for its pause, and another conversation that comes before that is served first."""
    said = [talk(0, (10, 1), (7, 1), think=100, name="a"), talk(50, (10, 1), name="b"), talk(300, (10, 1), name="c")]
    asked = Rehearsal(tiny_engine(tiny_model()), MACHINE, said).run()
    assert list(asked) == ["0.0", "1.0", "0.1", "2.0"]


def test_requests_of_a_file_share_what_their_ids_share() -> None:
    said = [Conversation(at, (Turn((Piece(b"s", 12), Piece(name, 8)), 0, 2, (), 0.0),)) for at, name in enumerate((b"x", b"y", b"x"))]
    one, two, three = Rehearsal(tiny_engine(tiny_model()), MACHINE, said).run().values()
    assert one.prompt[:12] == two.prompt[:12] and one.prompt != two.prompt and one.prompt == three.prompt
    assert two.tiers["device"] == 12 and three.tiers["device"] == 19


def test_a_shrunk_conversation_shares_as_much_as_before() -> None:
    [small] = shrunk([talk(0, (100, 60), (3, 1), (200, 100))], 10)
    assert [turn.new for turn in small.turns] == [10, 1, 20] and [turn.answer for turn in small.turns] == [6, 1, 10]
    assert [piece.tokens for piece in small.turns[2].context] == [16, 2]


def test_a_conversation_ends_before_it_is_too_long() -> None:
    said = [talk(0, (10, 5), (10, 5), (10, 5)), talk(1, (50, 5))]
    assert [len(one.turns) for one in part(said, 40)] == [2]


def test_the_command_shows_each_policy_in_the_engine_and_simulated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, kept = tmp_path / "trace.jsonl", tmp_path / "found.json"
    requests = [{"timestamp": i, "input_length": 1024, "output_length": 40, "hash_ids": [0, 1 + i % 3]} for i in range(6)]
    file.write_text("".join(json.dumps(request) + "\n" for request in requests))
    assert trace.main([str(file), "--engine", "--sessions", "5", "--policy", "lru", "--json", str(kept)]) == 0
    found = json.loads(kept.read_text())
    assert [(line["policy"], line["simulated"]) for line in found["lines"]] == [("recompute", False), ("lru", False), ("lru", True)]
    assert found["lines"][1]["turns"] == found["lines"][1]["equal"] == 5
    assert found["small"]["sessions"] == 5
    assert "5 of 5" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        ["--plot", "x.svg"],
        ["--host-gib", "3"],
        ["--warmup", "4"],
        ["--jobs", "2"],
        ["--think-seconds", "1,2"],
        ["--shape", "none"],
        ["--shares", "1,2"],
        ["--scale", "0"],
        ["--sessions", "0.5"],
    ],
)
def test_what_cannot_be_rehearsed_is_refused(options: list[str]) -> None:
    with pytest.raises((InvalidOption, SystemExit)):
        trace.main(["--generate", "sharegpt", "--engine", *options])
