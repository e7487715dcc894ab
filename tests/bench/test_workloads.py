"""Prompts and texts are what the cases say they are, with data and without."""

import json
from pathlib import Path

import pytest

from pando.bench.workloads import BOOK, DATA_VARIABLE, DIALOGUES, ENCYCLOPEDIA, gather, prefix, questions, windows
from pando.errors import InvalidOption


def encode(text: str) -> list[int]:
    return list(text.encode())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / BOOK).write_text("It was a long book. " * 100)
    (tmp_path / ENCYCLOPEDIA).write_text("An aspen is a tree.")
    turns = [f"What is the capital of country number {i}?" for i in range(100)]
    lines = [json.dumps({"history": [{"user": turn, "bot": "I do not know."}]}) for turn in (*turns, turns[0], "Hi", "x" * 1000)]
    (tmp_path / DIALOGUES).write_text("\n".join(lines) + "\n")
    return tmp_path


def test_a_named_folder_is_used_and_said(folder: Path) -> None:
    texts = gather(None, folder, {})
    assert texts.prose.startswith("It was a long book") and texts.scored == "An aspen is a tree."
    assert texts.sources == {"prefix": BOOK, "perplexity": ENCYCLOPEDIA, "prompts": DIALOGUES}


def test_a_dialogue_may_have_what_only_python_takes_for_the_end_of_a_line(folder: Path) -> None:
    asked = "What is a line?\u2028And what is\x85a page?"
    (folder / DIALOGUES).write_text(json.dumps({"history": [{"user": asked}]}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert gather(None, folder, {}).prompts == (asked,)


def test_the_environment_may_name_the_folder(folder: Path) -> None:
    assert gather(None, None, {DATA_VARIABLE: str(folder)}) == gather(None, folder, {})
    assert gather(None, None, {DATA_VARIABLE: ""}) == gather(None, None, {})


def test_prompts_are_different_and_of_a_length_people_type(folder: Path) -> None:
    prompts = gather(None, folder, {}).prompts
    assert len(prompts) == len(set(prompts)) == 100
    assert all(20 <= len(prompt) <= 300 for prompt in prompts)


def test_a_folder_that_lacks_a_file_is_refused_by_name(folder: Path) -> None:
    (folder / BOOK).unlink()
    with pytest.raises(InvalidOption, match=BOOK):
        gather(None, folder, {})


def test_without_data_the_output_says_what_stands_in() -> None:
    texts = gather(None, None, {})
    assert "Python" in texts.sources["prefix"] and "no data folder" in texts.sources["prompts"]
    assert len(prefix(encode, texts.prose, 2048)) == 2048
    assert len(set(texts.prompts)) >= 32


def test_a_text_of_ones_own_becomes_the_prefix(tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("my own words " * 10)
    texts = gather(own, None, {})
    assert prefix(encode, texts.prose, 12) == encode("my own words")
    assert texts.sources["prefix"] == "own.txt"


def test_a_text_too_short_or_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="has 5 tokens, and the shared prefix needs 2048"):
        prefix(encode, "short", 2048)
    with pytest.raises(InvalidOption, match="cannot be read as text"):
        gather(tmp_path / "nowhere.txt", None, {})


def test_questions_have_exactly_the_length_and_differ_from_the_start() -> None:
    asked = questions(encode, ["What is it?", "Who?"], 32, 16)
    assert len(asked) == 32 and {len(question) for question in asked} == {16}
    assert len({tuple(question[:4]) for question in asked}) == 32


def test_windows_cover_what_is_asked_for_once() -> None:
    assert windows(range(10), 4, 10) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert windows(range(10), 4, 6) == [[0, 1, 2, 3], [4, 5]]
    assert windows(range(9), 4, 100) == [[0, 1, 2, 3], [4, 5, 6, 7]]  # a lone token has nothing before it


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ("no JSON", "not dialogues"),
        ('{"history": []}', "not dialogues"),
        ('{"history": 3}', "not dialogues"),
        ('[{"user": "What is the capital of France?"}]', "not dialogues"),
        ('{"history": [{"user": "Hi"}]}', "none of 1 dialogues begins with 20 to 300 characters"),
        ("", "none of 0 dialogues"),
    ],
)
def test_a_file_that_holds_no_dialogues_is_refused(folder: Path, lines: str, complaint: str) -> None:
    (folder / DIALOGUES).write_text(lines)
    with pytest.raises(InvalidOption, match=complaint):
        gather(None, folder, {})
