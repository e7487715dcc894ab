"""Server-sent events, however they are cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pando.bench.events import Events

ENDS = ("\n", "\r\n", "\r")


def read(*pieces: bytes) -> list[str]:
    events = Events()
    return [data for piece in pieces for data in events.feed(piece)]


@pytest.mark.parametrize("end", ENDS, ids=repr)
def test_comments_names_and_empty_events_are_passed_over(end: str) -> None:
    lines = [": hello", "", "event: token", "data: one", "", "", "id: 7", "", "data:two", ""]
    assert read(end.join([*lines, ""]).encode()) == ["one", "two"]


@pytest.mark.parametrize("end", ENDS, ids=repr)
def test_several_lines_of_data_are_one_event(end: str) -> None:
    assert read(end.join(["data: {", "data:  1", "data", "data: }", "", ""]).encode()) == ["{\n 1\n\n}"]


@pytest.mark.parametrize("end", ENDS, ids=repr)
def test_an_event_is_told_with_its_last_byte_and_not_later(end: str) -> None:
    events = Events()
    assert list(events.feed(f"data: a{end}{end}".encode())) == ["a"]


def test_a_line_end_cut_in_two_is_one_line_end() -> None:
    assert read(b"data: a\r", b"\ndata: b\r", b"\n\r", b"\n") == ["a\nb"]


def test_an_unfinished_event_is_not_told() -> None:
    assert read(b"data: a\n\ndata: b\n") == ["a"]


def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    assert read("\ufeffdata: a\n\n".encode()) == ["a"]


def test_bytes_that_are_no_text_do_not_stop_the_reading() -> None:
    assert read(b"data: \xff\n\ndata: b\n\n") == ["\ufffd", "b"]


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), min_size=1), max_size=5),
    st.sampled_from(ENDS),
    st.lists(st.integers(0, 200)),
)
def test_how_the_bytes_are_cut_does_not_matter(sent: list[str], end: str, cuts: list[int]) -> None:
    whole = "".join("".join(f"data: {line}{end}" for line in data.split("\n")) + end for data in sent).encode()
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    assert read(*(whole[a:b] for a, b in pairwise(places))) == sent
