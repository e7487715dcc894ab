"""What is asked and when, without a server."""

import math
import statistics
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from random import Random

import pytest

from pando.bench.traffic import Source, Workload, arrivals, conversations, read_lengths, source
from pando.errors import InvalidOption

WORDS = source(None)
SHARED = Workload("shared-prefix", prefix=20, prompt=8, answer=5, groups=3, turns=1, think=0.0, requests=60, duration=None)
TURNS = replace(SHARED, kind="multi-turn", turns=4, think=2.0, groups=1, requests=10)


def test_gaps_between_arrivals_are_exponential() -> None:
    times = list(islice(arrivals(5.0, Random(1)), 20_000))
    gaps = [after - before for before, after in pairwise([0.0, *times])]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.03)
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), rel=0.03)


def test_a_seed_gives_the_same_traffic_and_another_seed_another() -> None:
    assert conversations(SHARED, WORDS, 2.0, "7") == conversations(SHARED, WORDS, 2.0, "7")
    assert conversations(SHARED, WORDS, 2.0, "7") != conversations(SHARED, WORDS, 2.0, "8")


def test_other_texts_arrive_at_the_same_times() -> None:
    longer = replace(SHARED, prompt=99, prefix=0)
    assert [c.arrival for c in conversations(SHARED, WORDS, 2.0, "7")] == [c.arrival for c in conversations(longer, WORDS, 2.0, "7")]


def test_an_endless_rate_sends_all_at_once() -> None:
    assert {c.arrival for c in conversations(SHARED, WORDS, math.inf, "7")} == {0.0}


def test_requests_of_a_group_share_their_prefix_and_nothing_else() -> None:
    made = conversations(SHARED, WORDS, 2.0, "7")
    assert len({c.system for c in made}) == 3
    assert {len(c.system.split()) for c in made} == {20}
    assert len({c.turns[0].text for c in made}) == 60


def test_a_conversation_has_its_turns_and_the_last_one_what_is_left() -> None:
    made = conversations(TURNS, WORDS, 2.0, "7")
    assert [len(c.turns) for c in made] == [4, 4, 2]
    assert all(c.turns[0].think == 0 and c.turns[1].think > 0 for c in made)


def test_conversations_arrive_so_that_their_requests_come_at_the_rate() -> None:
    made = conversations(replace(TURNS, requests=8000, prompt=1), WORDS, 2.0, "7")
    assert made[-1].arrival == pytest.approx(8000 / 2.0, rel=0.1)


def test_nothing_begins_after_the_duration() -> None:
    made = conversations(replace(SHARED, requests=None, duration=50.0), WORDS, 4.0, "7")
    assert 150 < len(made) < 250
    assert made[-1].arrival < 50


def test_lengths_are_those_of_the_file_in_words_of_so_many_tokens() -> None:
    lengths = ((30, 5), (60, 7))
    made = conversations(replace(SHARED, kind="lengths", prefix=0, lengths=lengths), replace(WORDS, tokens_per_word=1.5), 2.0, "7")
    assert {(len(c.turns[0].text.split()), c.turns[0].answer) for c in made} == {(20, 5), (40, 7)}
    assert {c.system for c in made} == {""}


def test_cuts_of_a_short_text_do_not_begin_alike(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("to be or not to be")
    made = conversations(replace(SHARED, prompt=4), source(file), 2.0, "7")
    assert len({c.turns[0].text.split()[0] for c in made}) == len(made)
    assert set(made[0].turns[0].text.split()[1:]) <= {"to", "be", "or", "not"}


def test_a_cut_of_a_running_text_goes_on_at_its_beginning() -> None:
    random = Random(0)
    cuts = [Source(("a", "b", "c"), running=True).cut(6, random).split()[1:] for _ in range(20)]
    assert {tuple(cut) for cut in cuts} == {tuple("abcab"), tuple("bcabc"), tuple("cabca")}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("42,285\n19,82\n", ((42, 285), (19, 82))),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15,374,44\r\n", ((374, 44),)),
        ("output_tokens,prompt_tokens\n\n1,2\n", ((2, 1),)),
        ("\ufeff42,285\n", ((42, 285),)),
    ],
)
def test_a_file_of_lengths_is_read_with_or_without_a_head(text: str, found: object, tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text(text)
    assert read_lengths(file) == found


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no lengths"),
        ("prompt,output\n", "no lengths"),
        ("1,2\n3\n", "line 2"),
        ("1,2\n3,x\n", "line 2"),
        ("prompt,output\n1,0\n", "line 2"),
        ("prompt,output\n\n1,0\n", "line 3"),
        ("1,2,3\n", "3 columns and no head"),
        ("a,b\n1,2\n", "name one of them prompt"),
        ("prompt,prompt,output\n1,2,3\n", "name one of them prompt"),
    ],
)
def test_a_bad_file_of_lengths_is_refused_with_its_place(text: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text(text)
    with pytest.raises(InvalidOption, match=complaint):
        read_lengths(file)


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe\xff"])
def test_a_text_without_words_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(content)
    with pytest.raises(InvalidOption, match=r"text: (cannot be read|holds no words)"):
        source(file)
