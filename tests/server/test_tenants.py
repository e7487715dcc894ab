"""A key opens its own door, no tenant shares with another by accident, and what is public is public to the token."""

import hashlib
import hmac

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pando.errors import InvalidOption
from pando.kv.segment import shared_length
from pando.server import tenants as module
from pando.server.tenants import ANONYMOUS, Public, Tenants

KEYS = ["sk-first", "sk-second", "sk-third"]


def test_every_key_is_recognised_as_its_own_owner():
    tenants = Tenants(KEYS)
    owners = [tenants.recognise(f"Bearer {key}") for key in KEYS]
    assert None not in owners and len(set(owners)) == 3
    assert owners == [Tenants([key]).recognise(f"Bearer {key}") for key in KEYS]  # the same after a restart with other keys beside it


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_is_written_in_any_case(scheme):
    assert Tenants(KEYS).recognise(f"{scheme} sk-first") == Tenants(KEYS).recognise("Bearer  sk-first ")
    assert Tenants(KEYS).recognise(f"{scheme} sk-first") is not None


@pytest.mark.parametrize(
    "header",
    [None, "", " ", "Bearer", "Bearer ", "sk-first", "Basic sk-first", "Bearer sk-firs", "Bearer sk-first2", "Bearer SK-FIRST",
     "Bearer sk-first sk-second", "Bearer sk-first,sk-second", "Bearer \ud83d", "Bearer é"],
)  # fmt: skip
def test_anything_else_is_not_recognised(header):
    assert Tenants(KEYS).recognise(header) is None


@settings(max_examples=200, deadline=None)
@given(header=st.text())
def test_no_header_breaks_it(header):
    assert Tenants(KEYS).recognise(header) is None


@pytest.mark.parametrize("header", [None, "", "Bearer anything"])
def test_without_keys_everyone_is_the_same_owner(header):
    assert Tenants([]).recognise(header) == ANONYMOUS


@pytest.mark.parametrize("header", ["Bearer sk-first", "Bearer sk-third", "Bearer wrong"])
def test_every_key_is_compared_whichever_matches(header, monkeypatch):
    compared = []

    def compare(a, b):
        compared.append((len(a), len(b)))
        return hmac.compare_digest(a, b)

    tenants = Tenants(KEYS)
    monkeypatch.setattr(module, "hmac", type("Counting", (), {"compare_digest": staticmethod(compare)}))
    tenants.recognise(header)
    assert compared == [(32, 32)] * len(KEYS)


@pytest.mark.parametrize("key", ["", " ", "two words", "schlüssel", "line\n"])
def test_a_key_that_no_header_carries_is_refused_without_being_shown(key):
    with pytest.raises(InvalidOption, match="number 2") as refused:
        Tenants(["sk-first", key])
    assert "schl" not in str(refused.value) and "sk-first" not in str(refused.value)


def test_no_key_is_shown_or_kept():
    tenants = Tenants(KEYS)
    shown = repr(tenants) + repr(vars(tenants)) + repr(tenants.recognise("Bearer sk-first"))
    assert not any(key in shown for key in KEYS)
    assert "3 keys" in repr(tenants)


def test_an_owner_is_not_the_bare_digest_of_the_key():
    """Digests of keys are what leaked lists hold."""
    assert Tenants(KEYS).recognise("Bearer sk-first") != hashlib.sha256(b"sk-first").digest()


@settings(max_examples=100, deadline=None)
@given(pairs=st.lists(st.tuples(st.binary(max_size=3), st.text(alphabet="ab\0", max_size=3)), min_size=2, max_size=2, unique=True))
def test_no_two_pairs_of_owner_and_salt_share(pairs):
    tenants = Tenants([])
    assert len({tenants.tenant(owner, salt).salt for owner, salt in pairs}) == 2


def test_what_moves_from_the_owner_to_the_salt_makes_another_tenant():
    tenants = Tenants([])
    assert len({tenants.tenant(owner, salt).salt for owner, salt in ((b"ab", ""), (b"a", "b"), (b"", "ab"))}) == 3


def test_the_same_pair_always_shares():
    tenant = Tenants(KEYS).tenant(b"owner", "salt")
    assert tenant == Tenants([]).tenant(b"owner", "salt")
    assert tenant.owner == b"owner" and len(tenant.salt) == 32
    assert Tenants(KEYS).tenant(b"owner", None) == Tenants(KEYS).tenant(b"owner", "")


def test_a_salt_may_be_any_text_that_json_carries():
    salts = {Tenants([]).tenant(ANONYMOUS, salt).salt for salt in ("\ud83d", "\ude00", "😀", "?", "\ufffd")}
    assert len(salts) == 5


def test_a_prompt_is_public_as_far_as_it_is_a_public_one():
    public = Public([[1, 2, 3, 4], [1, 2, 9], [7]])
    assert public.length([1, 2, 3, 4, 5, 6]) == 4
    assert public.length([1, 2, 3]) == 3
    assert public.length([1, 2, 3, 8]) == 3
    assert public.length([1, 2, 9, 4]) == 3
    assert public.length([1, 5]) == 1
    assert public.length([7, 7]) == 1
    assert public.length([8]) == public.length([]) == 0


def test_without_public_prompts_nothing_is_public():
    assert Public([]).length([1, 2, 3]) == Public([[]]).length([1, 2, 3]) == 0


sequences = st.lists(st.integers(0, 2), max_size=8)


@settings(max_examples=200, deadline=None)
@given(prompts=st.lists(sequences, max_size=8), tokens=sequences)
def test_the_public_part_is_what_comparing_with_every_prompt_finds(prompts, tokens):
    assert Public(prompts).length(tokens) == max((shared_length(prompt, tokens) for prompt in prompts), default=0)
