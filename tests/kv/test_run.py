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


def test_a_part_stands_and_is_made_where_it_was_in_the_whole() -> None:
    context = (Run((1, 2, 3, 4), 0, Origin((), 0)),)
    whole = Run(TOKENS, 50, Origin(context, 4))
    assert whole.part(0, 8).origin is whole.origin
    for part, start in ((whole.part(8, 22), 8), (whole.part(8, 22).part(4, 14), 12)):
        assert (part.tokens, part.position, part.shift) == (TOKENS[start:], 50 + start, whole.shift)
        assert part.origin is not None and whole.origin is not None
        assert (part.origin.first, part.origin.start, part.origin.before) == (4 + start, 4, TOKENS[:start])
        assert part.origin.key(b"us") == whole.origin.key(b"us"), "it is computed behind the same"


def test_the_root_of_what_is_computed_names_the_tenant_the_context_and_the_place() -> None:
    context = (Run((1, 2, 3, 4), 0, Origin((), 0)),)
    assert Origin((), 0).key(b"us") == b"us"
    assert len({Origin(*made).key(root) for root in (b"us", b"them") for made in (((), 0), ((), 4), (context, 4), (context, 8))}) == 8


def test_a_plain_run_is_the_beginning_of_a_prompt() -> None:
    context = (Run((1, 2, 3, 4), 0, Origin((), 0)),)
    assert Run(TOKENS, 0).is_plain and Run(TOKENS, 0, Origin((), 0)).is_plain
    others = Run(TOKENS, 4), Run(TOKENS, 4, Origin((), 0)), Run(TOKENS, 0, Origin((), 4)), Run(TOKENS, 0, Origin(context, 4))
    assert not any(run.is_plain for run in others)


def test_a_context_with_words_of_a_prompt_is_named_as_the_prompt_has_it() -> None:
    some = (Run(TOKENS, 0, Origin((), 0)), Run((1, 2), 22))
    assert Origin(some, 24).placed_digest == Origin(tuple(in_place(some)), 24).digest != Origin(some, 24).digest


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
    placed = [run.origin.placed_digest for run in found if run.origin is not None]
    assert time.thread_time() - start < 2
    assert len(names) == len(set(names[1::2])) * 2 == len(some)
    for run, name in zip(found[:20], placed, strict=False):
        assert run.origin is not None and run.origin.digest == context_digest(run.origin.context)
        assert name == context_digest(in_place(run.origin.context))


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
