"""Remembering so much, and no more."""

from pando.kv.latest import Latest


def test_the_oldest_are_forgotten_however_things_are_put_in() -> None:
    known = Latest[str, int](3)
    known["a"] = 1
    known.update(dict.fromkeys("bcd", 2))
    assert list(known.items()) == [("b", 2), ("c", 2), ("d", 2)]
    assert known.setdefault("b", 3) == 2 and known.setdefault("e", 3) == 3
    assert list(known) == ["c", "d", "e"]


def test_what_is_put_again_keeps_its_place_until_it_is_moved() -> None:
    known = Latest[str, int](2)
    known.update(a=1, b=1)
    known["a"] = 2
    known["c"] = 1
    assert list(known) == ["b", "c"]
    known.move_to_end("b")
    known["d"] = 1
    assert list(known) == ["b", "d"]
