"""Who asks, and what they share: API keys, the salts derived from them, and prompts that are public to all."""

import hashlib
import hmac
from bisect import bisect_left
from collections.abc import Sequence

from ..engine.request import Tenant
from ..errors import InvalidOption
from ..kv.segment import shared_length

ANONYMOUS = b""  # the owner of every request where no key is configured


class Tenants:
    """The API keys that are let in, of which only digests are kept; `salt` is the server's own, part of every tenant's."""

    def __init__(self, keys: Sequence[str], salt: str = "") -> None:
        self._salt = _bytes(salt)
        for place, key in enumerate(keys):
            if not key or not all("!" <= char <= "~" for char in key):
                raise InvalidOption(
                    f"API key number {place + 1} is empty, or has characters that a header cannot hold; use printable ASCII without spaces"
                )
        self._owners = tuple(dict.fromkeys(_owner(key) for key in keys))

    def __repr__(self) -> str:
        return f"Tenants({len(self._owners)} keys)"

    @property
    def owners(self) -> tuple[bytes, ...]:
        """Everyone who may ask."""
        return self._owners or (ANONYMOUS,)

    def recognise(self, authorization: str | None) -> bytes | None:
        """The owner whose key the header `Authorization: Bearer KEY` holds; None where it holds none that is configured."""
        if not self._owners:
            return ANONYMOUS
        scheme, _, key = (authorization or "").strip().partition(" ")
        given = _owner(key.strip())
        found = None
        for owner in self._owners:  # all of them, and each in constant time: how long it takes tells nothing about the keys
            if hmac.compare_digest(owner, given):
                found = owner
        return found if scheme.lower() == "bearer" else None

    def tenant(self, owner: bytes, cache_salt: str | None) -> Tenant:
        """What a request may share with: others of the same owner and the same salt. An empty salt is none."""
        return Tenant(salt=_digest(b"pando tenant", self._salt, owner, _bytes(cache_salt or "")), owner=owner)


class Public:
    """Prompts that are no secret: their tokens are shared among all tenants."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self._prompts = sorted({tuple(prompt) for prompt in prompts})
        self._longest = max(map(len, self._prompts), default=0)

    def length(self, tokens: Sequence[int]) -> int:
        """How many of the first tokens of a prompt are public: those it shares with a public prompt."""
        beginning = tuple(tokens[: self._longest])
        place = bisect_left(self._prompts, beginning)  # in sorted order, the most alike stand next to each other
        return max((shared_length(prompt, beginning) for prompt in self._prompts[max(0, place - 1) : place + 1]), default=0)


def _owner(key: str) -> bytes:
    return _digest(b"pando owner", _bytes(key))


def _digest(purpose: bytes, *parts: bytes) -> bytes:
    """Lengths are part of the digest, so that no two lists of parts collide."""
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in (purpose, *parts))).digest()


def _bytes(text: str) -> bytes:
    """JSON can carry half a surrogate pair; it is as good a salt as any."""
    return text.encode(errors="surrogatepass")
