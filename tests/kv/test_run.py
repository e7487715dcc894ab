"""What a prompt is made of, and what is remembered of it."""

import struct
import time
from array import array

import pytest

from pando.kv import run as runs
from pando.kv.run import KNOWN, Origin, Run, context_digest, in_place
from pando.kv.segment import Key, Lineage, compact, extend_keys, packed

PAGE = 4
TOKENS = tuple(range(100, 122))
US = Lineage.of(b"us")


def keys_of(tokens: tuple[int, ...], context: Lineage, page_size: int = PAGE) -> tuple[Key, ...]:
    keys: list[Key] = []
    extend_keys(keys, context, tokens, page_size)
    return tuple(keys)


def test_a_run_has_the_keys_of_its_pages_wherever_it_stands() -> None:
    run = Run(TOKENS, 7, Origin((), 0))
    assert run.keys(US, PAGE) == keys_of(TOKENS, US) == run.moved(90).keys(US, PAGE)
    assert len(run.keys(US, PAGE)) == 5, "what is left is no page"
    assert run.keys(US, 8) == keys_of(TOKENS, US, 8)


def test_a_run_that_is_moved_to_the_same_place_again_is_the_same_one() -> None:
    run = Run(TOKENS, 3, Origin((), 3))
    places = [*range(10), *range(10)]
    assert all(run.moved(place).digest == Run(TOKENS, place, Origin((), 3)).digest for place in places), "however many there are"
    assert run.moved(9) is run.moved(9) and run.moved(9).position == 9


def test_tenants_and_what_is_public_of_them_have_keys_of_their_own() -> None:
    run, contexts = Run(TOKENS, 0, Origin((), 0)), [US, Lineage(b"all", b"us", 2), Lineage(b"all", b"them", 2), Lineage(b"all", b"us", 3)]
    for context in (*contexts, *contexts):
        assert run.keys(context, PAGE) == keys_of(TOKENS, context)
    assert len({run.keys(context, PAGE)[-1] for context in contexts}) == 4


def test_however_many_tenants_ask_each_gets_its_own_keys() -> None:
    run = Run(TOKENS, 0, Origin((), 0))
    many = [Lineage.of(bytes([number])) for number in range(3 * KNOWN)]
    for context in (*many, *reversed(many)):
        assert run.keys(context, PAGE) == keys_of(TOKENS, context)


def test_a_part_has_the_keys_of_the_whole() -> None:
    run = Run(TOKENS, 0, Origin((), 0))
    assert run.keys(US, PAGE) == keys_of(TOKENS, US)
    head, rest = run.part(0, 8), run.part(8, 22)
    assert head.keys(US, PAGE) == keys_of(TOKENS[:8], US), "and not those of what it was cut from"
    assert rest.keys(US, PAGE) == keys_of(TOKENS, US)


def test_what_is_computed_where_it_stands_has_keys_behind_what_stands_before() -> None:
    before, own = Run(TOKENS, 0, Origin((), 0)), Run((1, 2, 3, 4, 5), 22)
    placed = in_place([before, own])[1]
    assert placed.origin is not None
    context = Lineage.of(placed.origin.key(b"us"))
    assert placed.keys(context, PAGE) == keys_of(own.tokens, context) != keys_of(own.tokens, US)


def test_words_between_thousands_of_modules_name_what_stands_before_them_in_a_moment() -> None:
    module = Run(TOKENS, 0, Origin((), 0))
    some = [run for place in range(0, 90_000, 30) for run in (module.moved(place), Run((place,), place + len(TOKENS)))]
    start = time.thread_time()
    found = in_place(some)
    names = [run.origin.digest for run in found if run.origin is not None]
    assert time.thread_time() - start < 2
    assert len(names) == len(set(names[1::2])) * 2 == len(some)
    for run in found[:20]:
        assert run.origin is not None and run.origin.digest == context_digest(run.origin.context)


def test_the_keys_of_a_run_are_computed_once_for_a_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def watch(keys: list[Key], lineage: Lineage, tokens: tuple[int, ...], page_size: int) -> None:
        asked.append(lineage)
        extend_keys(keys, lineage, tokens, page_size)

    monkeypatch.setattr(runs, "extend_keys", watch)
    run, them = Run(TOKENS, 0, Origin((), 0)), Lineage.of(b"them")
    for place in range(5):
        run.moved(place).keys(US, PAGE)
        run.keys(them, PAGE)
    assert asked == [US, them]


@pytest.mark.parametrize("wrong", [-1, 256, True, 1.0, "1", None])
def test_what_is_no_token_is_found_each_time(wrong: object) -> None:
    run = Run((3, wrong, 5), 0)  # type: ignore[arg-type]
    assert not run.is_of(256)
    assert not run.is_of(256) and not run.moved(9).is_of(256)


def test_what_one_vocabulary_has_another_may_lack() -> None:
    run = Run((3, 255), 0)
    assert run.is_of(256) and run.moved(1).is_of(256)
    assert not run.is_of(255)
    assert run.is_of(256)


def test_tokens_are_named_alike_whatever_they_come_in() -> None:
    tokens = [3, 1 << 30, 0, 7]
    for given in (tokens, tuple(tokens), array("i", tokens), array("q", tokens), array("I", tokens)):
        assert packed(given) == struct.pack("4i", *tokens)
        assert compact(given) == array("i", tokens) and compact(given) is not given
