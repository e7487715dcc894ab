import random

import pytest

from pando.kv.segment import Key, Lineage, extend_keys, page_key, root_key, shared_length
from pando.kv.stem import Stem
from pando.kv.tree import Match, PrefixTree

PAGE = 4
ROOT = root_key(b"model", b"")


def keys_of(tokens: list[int], root: Key = ROOT) -> list[Key]:
    keys: list[Key] = []
    extend_keys(keys, Lineage.of(root), tokens, PAGE)
    return keys


def remember(tree: PrefixTree, tokens: list[int], pages: list[int], root: Key = ROOT, now: int = 0) -> Stem:
    """As a row would: pins the root, hands over whole pages, then its end, and lets go."""
    stem = tree.root(root)
    tree.pin(stem)
    whole = len(tokens) // PAGE
    end = tree.insert(stem, keys_of(tokens, root), tokens[: whole * PAGE], pages[:whole], root, now).stem
    if tokens[whole * PAGE :]:
        tree.insert_end(end, tokens[whole * PAGE :], pages[whole], root, now)
    tree.unpin(stem)
    return end


def find(tree: PrefixTree, tokens: list[int], root: Key = ROOT, now: int = 0) -> Match:
    return tree.match(Lineage.of(root), keys_of(tokens, root), tokens, len(tokens), now)


def pages_of(match: Match) -> list[int]:
    return [page for segment in match.stem.path() for page in segment.pages]


def test_a_known_prefix_is_found_in_its_own_pages() -> None:
    tree = PrefixTree(PAGE)
    remember(tree, list(range(12)), [7, 8, 9])
    match = find(tree, [*range(12), 99])
    assert pages_of(match) == [7, 8, 9]
    assert match.length == 12


def test_a_match_inside_a_page_names_the_page_to_copy() -> None:
    tree = PrefixTree(PAGE)
    remember(tree, list(range(12)), [7, 8, 9])
    match = find(tree, [0, 1, 2, 3, 4, 5, 99, 98])
    assert (pages_of(match), match.page, match.tokens) == ([7], 8, 2)


def test_an_unfilled_last_page_is_remembered_and_copied() -> None:
    tree = PrefixTree(PAGE)
    remember(tree, [0, 1, 2, 3, 4, 5], [7, 8])
    match = find(tree, [0, 1, 2, 3, 4, 5, 6, 7, 8])
    assert (pages_of(match), match.page, match.tokens) == ([7], 8, 2)


def test_the_longest_of_several_continuations_is_copied() -> None:
    tree = PrefixTree(PAGE)
    remember(tree, [0, 1, 9, 9], [1])
    remember(tree, [0, 1, 2, 9], [2])
    match = find(tree, [0, 1, 2, 3])
    assert (match.page, match.tokens) == (2, 3)


def test_a_page_that_soon_goes_on_differently_may_not_be_worth_copying() -> None:
    tree, lineage = PrefixTree(PAGE), Lineage.of(ROOT)
    remember(tree, [0, 1, 2, 3, 4, 5], [7, 8])
    remember(tree, [0, 1, 2, 3, 9], [7, 6])

    def copied(*tokens: int) -> tuple[int | None, int]:
        match = tree.match(lineage, keys_of([*tokens]), tokens, len(tokens), 0, least=2)
        return match.page, match.tokens

    assert copied(0, 1, 2, 3, 4, 9) == (None, 0)
    assert copied(0, 1, 2, 3, 4, 5, 9) == (8, 2)
    assert copied(0, 1, 2, 3, 9, 9) == (6, 1), "all of what is known is continued"
    assert copied(0, 1, 2, 3, 4) == (8, 1), "all that is wanted is known"


def test_a_chain_is_known_where_it_may_begin_at_a_root_or_at_any_page() -> None:
    tree, tokens = PrefixTree(PAGE), list(range(12))
    keys = keys_of(tokens)
    assert not tree.knows(ROOT)
    remember(tree, tokens, [7, 8, 9])
    assert tree.knows(ROOT) and all(map(tree.knows, keys))
    behind = tree.match(Lineage.of(keys[0]), keys[1:], tokens[PAGE:], 8, 0, first=PAGE)
    assert behind.length == 12, "which begins at its first page"
    tree.forget_bare(behind.stem)
    tree.clear()
    assert not any(map(tree.knows, (ROOT, *keys))), "and whoever is not known is not looked for"
    tree.forget_bare(find(tree, tokens).stem)
    assert not tree.knows(ROOT), "a look leaves nothing behind"


def test_what_ends_with_a_page_is_found_by_that_alone_where_it_begins_at_the_root() -> None:
    tree, tokens = PrefixTree(PAGE), list(range(16))
    keys = keys_of(tokens)
    remember(tree, tokens, [1, 2, 3, 4])
    assert tree.ending(ROOT, keys[1], 5) is None, "a stem goes on from there"
    assert pages_of(find(tree, tokens[:8])) == [1, 2]
    for last in (1, 3):
        found = tree.ending(ROOT, keys[last], 5)
        assert found is find(tree, tokens[: (last + 1) * PAGE], now=5).stem and found.used == 5
    assert tree.ending(keys[0], keys[3], 5) is None and tree.ending(ROOT, keys_of([9] * PAGE)[0], 5) is None
    tree.clear()
    assert tree.ending(ROOT, keys[3], 6) is None


def test_a_limit_leaves_the_last_token_to_be_computed() -> None:
    tree = PrefixTree(PAGE)
    tokens = list(range(8))
    remember(tree, tokens, [1, 2])
    match = tree.match(Lineage.of(ROOT), keys_of(tokens), tokens, 7, 0)
    assert (pages_of(match), match.page, match.tokens) == ([1], 2, 3)


def test_the_same_run_is_stored_once() -> None:
    tree = PrefixTree(PAGE)
    remember(tree, list(range(8)), [1, 2])
    root = tree.root(ROOT)
    tree.pin(root)
    again = tree.insert(root, keys_of([*range(8), 50, 51, 52, 53]), [*range(8), 50, 51, 52, 53], [5, 6, 7], ROOT, 1)
    assert again.pages == [1, 2, 7]
    assert again.spare == [5, 6]
    assert tree.pages == 3


def test_a_longer_run_makes_a_shorter_end_superfluous() -> None:
    tree = PrefixTree(PAGE)
    remember(tree, [0, 1], [3])
    root = tree.root(ROOT)
    assert tree.insert_end(root, [0, 1, 2], 4, ROOT, 1) == [3]
    tree.pin(root)
    assert tree.insert(root, keys_of([0, 1, 2, 3]), [0, 1, 2, 3], [5], ROOT, 1).spare == [4]
    assert tree.pages == 1
    assert tree.insert_end(root, [0, 1], 6, ROOT, 1) == [6], "a known end is not stored again"


def test_a_path_is_the_same_tuple_until_a_stem_on_it_is_cut_or_grows() -> None:
    tree = PrefixTree(PAGE)
    remember(tree, list(range(8)), [1, 2])
    leaf, beside = (remember(tree, [*range(8), *[last] * 4], [1, 2, last]) for last in (77, 88))
    before, untouched = leaf.path(), remember(tree, [50] * 8, [3, 4]).path()
    find(tree, [*range(8), 99])
    assert leaf.path() is before and [segment.pages for segment in before] == [(1, 2), (77,)]
    find(tree, [*range(4), 99, 99, 99, 99])
    assert [segment.pages for segment in leaf.path()] == [(1,), (2,), (77,)]
    assert leaf.path()[:2] == beside.path()[:2]
    assert find(tree, [50] * 8).stem.path() is untouched
    tree.pin(leaf)
    assert tree.insert(leaf, keys_of([*range(8), *[77] * 8])[3:], [77] * 4, [5], ROOT, 1).stem is leaf
    assert leaf.path()[-1].pages == (77, 5)


def test_cutting_a_stem_keeps_those_who_stand_below() -> None:
    tree = PrefixTree(PAGE)
    leaf = remember(tree, list(range(12)), [1, 2, 3])
    tree.pin(leaf)
    find(tree, [*range(8), 77, 77, 77, 77])
    assert [page for segment in leaf.path() for page in segment.pages] == [1, 2, 3]
    assert leaf.end == 12
    assert tree.evict(10) == [], "what leads to a pinned stem stays"


def test_eviction_takes_the_ends_of_the_leaves_used_longest_ago() -> None:
    tree = PrefixTree(PAGE)
    remember(tree, [*range(8), 20, 20, 20, 20], [1, 2, 3], now=1)
    remember(tree, [*range(8), 30, 30, 30, 30, 31, 31, 31, 31], [1, 2, 4, 5], now=2)
    find(tree, [*range(8), 20, 20, 20, 20], now=3)
    assert tree.evict(1) == [5]
    assert tree.evict(1) == [4]
    assert tree.evict(1) == [3]
    assert sorted(tree.evict(9)) == [1, 2]
    assert tree.pages == 0


def test_a_pinned_segment_outlives_pressure() -> None:
    tree = PrefixTree(PAGE)
    kept = remember(tree, list(range(8)), [1, 2])
    remember(tree, list(range(100, 108)), [3, 4])
    tree.pin(kept)
    assert tree.evictable() == 2
    assert sorted(tree.evict(10)) == [3, 4]
    assert pages_of(find(tree, list(range(8)))) == [1, 2]
    tree.unpin(kept)
    assert sorted(tree.clear()) == [1, 2]


def test_a_leaf_that_another_row_stands_on_is_not_lengthened_under_it() -> None:
    tree = PrefixTree(PAGE)
    shared = remember(tree, list(range(8)), [1, 2])
    for _ in range(2):
        tree.pin(shared)
    grown = tree.insert(shared, keys_of([*range(8), 5, 5, 5, 5])[2:], [5, 5, 5, 5], [3], ROOT, 1).stem
    assert grown is not shared
    assert shared.end == 8


def test_a_row_alone_on_its_leaf_lengthens_it() -> None:
    tree = PrefixTree(PAGE)
    leaf = remember(tree, list(range(8)), [1, 2])
    tree.pin(leaf)
    assert tree.insert(leaf, keys_of([*range(8), 5, 5, 5, 5])[2:], [5, 5, 5, 5], [3], ROOT, 1).stem is leaf
    assert leaf.segment.pages == (1, 2, 3)


def test_a_run_has_all_of_its_tokens_however_it_is_lengthened_cut_and_trimmed() -> None:
    tree, tokens = PrefixTree(PAGE), list(range(6 * PAGE))
    keys, stem = keys_of(tokens), tree.root(ROOT)
    for page in range(6):
        tree.pin(stem)
        grown = tree.insert(stem, keys[page : page + 1], tokens[page * PAGE : (page + 1) * PAGE], [page], ROOT, 0).stem
        tree.unpin(stem)
        stem = grown
    tree.pin(stem)
    assert stem.segment.tokens == tuple(tokens) and len(stem.segment) == len(tokens) and stem.segment.tokens[2:7] == tuple(tokens[2:7])
    upper = find(tree, tokens[: 2 * PAGE]).stem
    assert (upper.segment.tokens, stem.segment.tokens) == (tuple(tokens[: 2 * PAGE]), tuple(tokens[2 * PAGE :]))
    tree.unpin(stem)
    assert tree.evict(3) == [3, 4, 5] and stem.segment.tokens == tuple(tokens[2 * PAGE : 3 * PAGE])
    assert stem.segment.tokens != tuple(tokens[: 2 * PAGE]) and list(stem.segment.tokens) == tokens[2 * PAGE : 3 * PAGE]


def test_walking_into_another_rows_leaf_does_not_lengthen_it() -> None:
    tree = PrefixTree(PAGE)
    theirs = remember(tree, list(range(8)), [1, 2])
    tree.pin(theirs)
    root = tree.root(ROOT)
    tree.pin(root)
    tokens = [*range(8), 5, 5, 5, 5]
    mine = tree.insert(root, keys_of(tokens), tokens, [6, 7, 8], ROOT, 1).stem
    assert mine is not theirs
    assert theirs.end == 8


def test_tenants_share_nothing() -> None:
    tree = PrefixTree(PAGE)
    remember(tree, list(range(8)), [1, 2])
    other = root_key(b"model", b"salt")
    assert find(tree, list(range(8)), root=other).length == 0


def test_keys_name_model_salt_context_and_tokens() -> None:
    names = {
        page_key(root_key(b"m", b""), [1, 2]),
        page_key(root_key(b"n", b""), [1, 2]),
        page_key(root_key(b"m", b"s"), [1, 2]),
        page_key(root_key(b"m", b""), [1, 3]),
        page_key(page_key(root_key(b"m", b""), [0]), [1, 2]),
        page_key(root_key(b"ms", b""), [1, 2]),
    }
    assert len(names) == 6
    assert all(len(name) == 32 for name in names)


def test_keys_stay_what_they_were_so_that_what_earlier_releases_kept_is_found() -> None:
    assert page_key(root_key(b"m", b"s"), [1, 2, 3, 70000]).hex() == "1d74b0526cdbab6acde4987867828f86422890e7daf8f0333305e5cc46e075ed"


def test_a_very_deep_tree_is_walked_without_recursion() -> None:
    tree = PrefixTree(PAGE)
    depth = 2000  # twice what Python lets a function call itself
    tokens = [7] * (PAGE * depth)
    keys = keys_of(tokens)
    remember(tree, tokens, list(range(depth)))
    for pages in range(depth - 1, 0, -1):
        tree.match(Lineage.of(ROOT), keys, tokens, pages * PAGE, 0)  # cuts after every page
    assert len(list(tree.stems())) == depth
    assert tree.evictable() == depth
    assert len(tree.clear()) == depth


def test_what_is_found_is_always_what_was_inserted() -> None:
    chance = random.Random(0)
    tree, content, free = PrefixTree(PAGE), {}, list(range(400))
    for now in range(600):
        tokens = [chance.randrange(2) for _ in range(chance.randint(1, 40))]
        match = find(tree, tokens, now=now)
        known = pages_of(match) + ([match.page] if match.page is not None else [])
        for place, page in enumerate(known):
            said = tokens[place * PAGE : min((place + 1) * PAGE, match.length)]
            assert content[page][: len(said)] == said
        if len(free) < 20:
            freed = tree.evict(chance.randint(1, 30))
            free += freed
        whole = len(tokens) // PAGE
        own = [free.pop() for _ in range(whole)]
        for place, page in enumerate(own):
            content[page] = tokens[place * PAGE : (place + 1) * PAGE]
        root = tree.root(ROOT)
        tree.pin(root)
        free += tree.insert(root, keys_of(tokens), tokens[: whole * PAGE], own, ROOT, now).spare
        tree.unpin(root)
    held = [page for stem in tree.stems() for page in stem.segment.pages]
    assert len(held) == len(set(held)) == tree.pages
    assert not set(held) & set(free)


def test_what_can_be_evicted_is_counted_and_goes_in_the_order_of_its_use() -> None:
    chance = random.Random(1)
    tree, free, pinned = PrefixTree(PAGE), list(range(500)), list[Stem]()
    for now in range(1, 400):
        tokens = [chance.randrange(2) for _ in range(chance.randint(1, 30))]
        if len(free) < 20:
            before = {stem: stem.used for stem in tree.stems() if not stem.children and not stem.pins}
            free += tree.evict(1)
            gone = [stem for stem in before if stem not in set(tree.stems())]
            assert all(before[stem] == min(before.values()) for stem in gone)
            free += tree.evict(chance.randint(1, 30))
        count = -(-len(tokens) // PAGE)
        own = free[-count:]
        del free[-count:]
        stem = remember(tree, tokens, own, now=now)
        held = {page for each in tree.stems() for page in each.segment.pages}
        free += [page for page in own if page not in held]
        if chance.random() < 0.3:
            pinned.append(stem)
            tree.pin(stem)
        while pinned and (chance.random() < 0.2 or len(pinned) > 6):
            tree.unpin(pinned.pop(chance.randrange(len(pinned))))
        stays = {id(each) for stem in pinned for each in _up(stem)}
        loose = [each for each in tree.stems() if id(each) not in stays]
        assert tree.evictable() == sum(len(each.segment.pages) for each in loose)
        assert len(held) == tree.pages
    for stem in pinned:
        tree.unpin(stem)
    assert len(tree.clear()) == len(held) and not list(tree.stems())


def _up(stem: Stem | None) -> list[Stem]:
    return [] if stem is None else [stem, *_up(stem.parent)]


def test_of_thousands_of_continuations_only_those_that_begin_alike_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, compared = PrefixTree(PAGE), list[object]()
    trunk = remember(tree, [0, 1, 2, 3], [0])
    for token in range(2000):
        tree.insert_end(trunk, [token, token + 1], 1 + token, ROOT, 0)
    monkeypatch.setattr("pando.kv.tree.shared_length", lambda a, b: (compared.append(a), shared_length(a, b))[1])
    assert find(tree, [0, 1, 2, 3, 700, 701, 9]).page == 701
    assert (len(compared), len(trunk.children), tree.pages) == (2, 2000, 2001), "the trunk, and one behind it"
    tree.pin(trunk)
    gone = set(tree.evict(1500))
    for token in range(2000):
        assert find(tree, [0, 1, 2, 3, token, token + 1]).page == (None if 1 + token in gone else 1 + token)


@pytest.mark.parametrize("seed", range(4))
def test_of_thousands_that_all_begin_alike_the_one_that_does_for_longest_is_found_without_comparing_all(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, count, chance = 16, 2000, random.Random(seed)
    tree, compared, ours, others = PrefixTree(size), list[object](), b"ours", b"others"
    trunk = tree.root(ROOT)
    said: dict[bytes, list[list[int]]] = {ROOT: [], ours: [], others: []}
    for page in range(count):  # of few words, so that many begin alike, and some are the beginning of another
        tokens, owner = [1, 2, 3, *chance.choices(range(6), k=chance.randint(0, size - 4))], chance.choice(list(said))
        shared = [*said[owner], *said[ROOT]]
        known = any(other[: len(tokens)] == tokens for other in shared)
        spare = tree.insert_end(trunk, tokens, page, owner, 0)
        assert (spare == [page]) == known
        if not known:
            covered = [other for other in said[owner] if tokens[: len(other)] == other]
            assert len(spare) == len(covered)
            said[owner] = [other for other in said[owner] if other not in covered] + [tokens]
    monkeypatch.setattr("pando.kv.tree.shared_length", lambda a, b: (compared.append(a), shared_length(a, b))[1])
    for _ in range(500):
        rest, least = [1, 2, 3, *chance.choices(range(6), k=size - 4)], chance.randint(1, 8)
        found = tree.match(Lineage(ROOT, ours, 0), [], rest, len(rest), 0, least=least)
        lengths = [(shared_length(other, rest), len(other)) for other in (*said[ROOT], *said[ours])]
        assert found.tokens == max((n for n, length in lengths if n >= min(least, length, len(rest))), default=0)
    assert len(compared) <= 500 * 6


# ---- chains that begin at any key


def begin(tree: PrefixTree, tokens: list[int], skipped: int, pages: list[int], now: int = 0) -> Stem:
    """As a row would that has the pages of a chain from some page on, and none of those before it."""
    keys = keys_of(tokens)
    root = tree.root(keys[skipped - 1], skipped * PAGE)
    tree.pin(root)
    done = tree.insert(root, keys[skipped:], tokens[skipped * PAGE :], pages, ROOT, now)
    tree.unpin(root)
    return done.stem


def find_from(tree: PrefixTree, tokens: list[int], skipped: int, now: int = 0) -> list[int]:
    """The pages of a chain from some page on, whether those before it are there or not."""
    keys, first = keys_of(tokens), skipped * PAGE
    match = tree.match(Lineage(keys[skipped - 1], ROOT), keys[skipped:], tokens[first:], len(tokens) - first, now, first=first)
    pages = [page for segment in match.stem.path(first) for page in segment.pages]
    assert match.length - first >= len(pages) * PAGE
    tree.forget_bare(match.stem)
    return pages


def test_a_chain_is_found_from_any_page_on_without_those_before_it() -> None:
    tree, tokens = PrefixTree(PAGE), list(range(20))
    begin(tree, tokens, 2, [7, 8, 9])
    assert find_from(tree, tokens, 2) == [7, 8, 9]
    assert find_from(tree, tokens, 3) == [8, 9]
    assert pages_of(find(tree, tokens)) == [], "from its beginning there is nothing"
    assert tree.pages == 3


def test_what_is_there_with_its_beginning_is_found_from_any_page_on_and_again_from_its_beginning() -> None:
    tree, tokens = PrefixTree(PAGE), list(range(20))
    remember(tree, tokens, [1, 2, 3, 4, 5])
    for _ in range(2):
        assert find_from(tree, tokens, 2) == [3, 4, 5]
        assert pages_of(find(tree, tokens)) == [1, 2, 3, 4, 5]
    assert tree.pages == 5


def test_who_reads_from_a_page_on_does_not_hold_what_leads_to_it() -> None:
    tree, tokens = PrefixTree(PAGE), list(range(20))
    remember(tree, tokens, [1, 2, 3, 4, 5])
    stem = tree.match(Lineage(keys_of(tokens)[1], ROOT), keys_of(tokens)[2:], tokens[8:], 12, 0, first=8).stem
    tree.pin(stem)
    assert tree.evictable() == 2 and sorted(tree.evict(9)) == [1, 2]
    assert find_from(tree, tokens, 2) == [3, 4, 5]
    tree.unpin(stem)
    assert sorted(tree.clear()) == [3, 4, 5] and not list(tree.stems())


def test_a_beginning_that_comes_later_adopts_what_continues_it() -> None:
    tree, tokens = PrefixTree(PAGE), list(range(20))
    stem = begin(tree, tokens, 2, [7, 8, 9])
    tree.pin(stem)
    root = tree.root(ROOT)
    tree.pin(root)
    done = tree.insert(root, keys_of(tokens), tokens, [1, 2, 3, 4, 5], ROOT, 1)
    assert (done.stem, done.pages, done.spare) == (stem, [1, 2, 7, 8, 9], [3, 4, 5])
    assert [page for segment in stem.path() for page in segment.pages] == [1, 2, 7, 8, 9]
    assert (tree.pages, tree.evictable()) == (5, 0), "whoever reads the end holds the beginning, now that it is there"
    tree.unpin(root)
    tree.unpin(stem)
    assert tree.evictable() == 5


def test_where_a_beginning_is_read_with_its_continuation_both_stay_together() -> None:
    tree, tokens = PrefixTree(PAGE), list(range(20))
    stem = remember(tree, tokens, [1, 2, 3, 4, 5])
    tree.pin(stem)
    assert find_from(tree, tokens, 2) == [3, 4, 5]
    assert tree.evictable() == 0 and pages_of(find(tree, tokens)) == [1, 2, 3, 4, 5]
    beside = begin(tree, [*tokens[:12], *[50] * 8], 3, [8, 9])
    assert [segment.pages for segment in beside.path()][-1] == (8, 9) and beside.path()[0].first == 0


def test_who_began_at_a_key_hands_over_to_the_beginning_that_came_meanwhile() -> None:
    tree, tokens = PrefixTree(PAGE), list(range(22))
    root = tree.root(keys_of(tokens)[1], 8)
    tree.pin(root)
    remember(tree, tokens[:12], [1, 2, 3])
    done = tree.insert(root, keys_of(tokens)[2:], tokens[8:20], [7, 8, 9], ROOT, 1)
    assert (done.pages, done.spare) == ([3, 8, 9], [7]) and pages_of(find(tree, tokens)) == [1, 2, 3, 8, 9]
    brief = [*tokens[:8], 90, 91]
    remember(tree, brief, [1, 2, 6])
    assert tree.insert_end(root, brief[8:], 5, ROOT, 1) == [5]
    tree.unpin(root)
    assert sorted(tree.clear()) == [1, 2, 3, 6, 8, 9] and not tree._roots


def test_short_ends_move_with_the_page_that_they_continue() -> None:
    tree, tokens = PrefixTree(PAGE), list(range(10))
    stem = begin(tree, tokens[:8], 1, [7])
    assert tree.insert_end(stem, tokens[8:], 8, ROOT, 0) == []
    remember(tree, tokens[:4], [1])
    assert (pages_of(found := find(tree, tokens)), found.page, found.tokens) == ([1, 7], 8, 2)
    assert find_from(tree, tokens, 1) == [7]
    end = tree.root(keys_of(tokens)[1], 8)
    assert tree.insert_end(end, tokens[8:], 9, ROOT, 0) == [9], "it is known, wherever one comes from"
    assert sorted(tree.clear()) == [1, 7, 8]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_begins_where_every_page_is_there_once_and_stays_while_it_is_read(seed: int) -> None:
    chance = random.Random(seed)
    tree, free, content, readers = PrefixTree(PAGE), list(range(300)), dict[int, Key](), list[tuple[Stem, int, list[int]]]()
    for now in range(1, 250):
        if len(free) < 40:
            free += tree.evict(chance.randint(1, 60))
        tokens = [chance.randrange(2) for _ in range(PAGE * chance.randint(1, 7))]
        keys, skipped = keys_of(tokens), chance.choice((0, chance.randrange(len(tokens) // PAGE)))
        first, root = skipped * PAGE, keys[skipped - 1] if skipped else ROOT
        match = tree.match(Lineage(root, ROOT), keys[skipped:], tokens[first:], len(tokens) - first, now, first=first)
        tree.pin(match.stem)
        known = [page for segment in match.stem.path(first) for page in segment.pages]
        assert [content[page] for page in known] == keys[skipped : skipped + len(known)]
        own, rest = [free.pop() for _ in keys[skipped + len(known) :]], skipped + len(known)
        content.update(zip(own, keys[rest:], strict=True))
        done = tree.insert(match.stem, keys[rest:], tokens[rest * PAGE :], own, ROOT, now)
        free += done.spare
        tree.pin(done.stem)
        tree.unpin(match.stem)
        readers.append((done.stem, first, known + done.pages))
        while len(readers) > 4 or (readers and chance.random() < 0.3):
            tree.unpin(readers.pop(chance.randrange(len(readers)))[0])
        for stem, start, pages in readers:
            assert [page for segment in stem.path(start) for page in segment.pages] == pages
        held = [(page, key) for stem in tree.stems() for page, key in zip(stem.segment.pages, stem.segment.keys, strict=True)]
        assert len({page for page, _ in held}) == len({key for _, key in held}) == len(held) == tree.pages
        assert all(content[page] == key for page, key in held) and len(free) + len(held) == 300
        stays = {each for stem, _, _ in readers for each in _up(stem)}
        assert tree.evictable() == sum(len(each.segment.pages) for each in tree.stems() if each not in stays)
        assert all(root.children or root.pins for root in tree._roots.values()), "there may be any number of keys"
    for stem, _, _ in readers:
        tree.unpin(stem)
    assert len(tree.clear()) == len(held) and not list(tree.stems())
