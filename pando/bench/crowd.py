"""The clients of a soak test: some behave, some do not, some leave; and all of them look closely at what they get."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import cycle
from random import Random
from typing import Any

import httpx

from ..errors import InvalidOption
from .client import complaint
from .events import Events
from .ledger import Sent, Tally, Violation
from .mixture import Ask, Bad, Known, Mixture

TENANTS = ("one", "two")
PATIENCE = 0.5  # seconds, at most, until a client that leaves has left
LEAVES_AFTER = 6  # events of a stream, at most
FINE = frozenset({200})
QUOTA = "pin_quota_exceeded"
WHERE = ("/v1/cache", "/metrics", "/v1/models", "/health", "/ready", "/version")


@dataclass(frozen=True)
class Heard:
    status: int
    bodies: tuple[dict[str, Any], ...]

    def texts(self, rows: int) -> tuple[str, ...]:
        texts = [""] * rows
        for choice in self._choices():
            texts[choice["index"]] += choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
        return tuple(texts)

    @property
    def finished(self) -> int:
        return sum(choice["finish_reason"] is not None for choice in self._choices())

    @property
    def cached(self) -> int:
        return int(self.bodies[-1]["usage"]["prompt_tokens_details"]["cached_tokens"])

    @property
    def prompt(self) -> tuple[int, ...]:
        """Of one that was asked for whole, with its tokens."""
        body = self.bodies[0]
        return tuple(body["prompt_token_ids"] if "prompt_token_ids" in body else body["choices"][0]["prompt_token_ids"])

    @property
    def answer(self) -> tuple[int, ...]:
        return tuple(self.bodies[0]["choices"][0]["token_ids"])

    def _choices(self) -> list[dict[str, Any]]:
        return [choice for body in self.bodies for choice in body.get("choices", ())]


How = Callable[[httpx.AsyncClient], Awaitable[Heard]]


async def send(http: httpx.AsyncClient, ask: Ask) -> Heard:
    if not ask.body.get("stream"):
        return heard(await http.post(ask.path, json=ask.body))
    async with http.stream("POST", ask.path, json=ask.body) as response:
        if response.status_code != 200:
            await response.aread()
            return heard(response)
        events = Events()
        told = [data async for piece in response.aiter_raw() for data in events.feed(piece)]
        return Heard(200, tuple(json.loads(data) for data in told if data != "[DONE]"))


def heard(response: httpx.Response) -> Heard:
    found = response.json() if response.headers.get("content-type", "").startswith("application/json") else {}
    return Heard(response.status_code, (found,) if isinstance(found, dict) else ())


async def alone(http: httpx.AsyncClient, ask: Ask) -> Known:
    """Asks while nobody else does."""
    found = await send(http, ask.but(return_token_ids=True))
    if found.status != 200:
        said = complaint(found.bodies[0]) if found.bodies else "nothing"
        raise InvalidOption(f"an idle server answered {found.status} to a {ask.kind} request, and said: {said}; another --model may do")
    return Known(ask, found.texts(ask.rows), found.prompt, found.answer)


async def session(http: httpx.AsyncClient, mixture: Mixture, messages: Sequence[dict[str, str]]) -> list[Known]:
    """The turns of a conversation, each with the answers before it."""
    turns: list[Known] = []
    for _ in range(mixture.sizes.turns):
        turns.append(await alone(http, mixture.chat("turn", messages).but(session_id=messages[-1]["content"])))
        messages = [*messages, {"role": "assistant", "content": turns[-1].texts[0]}, {"role": "user", "content": mixture.text()}]
    return turns


class Crowd:
    """Everything that clients do, in one place; `http` has a connection for each tenant, for one without a key and one with a wrong one."""

    def __init__(
        self,
        http: dict[str, httpx.AsyncClient],
        singles: Sequence[Known],
        sessions: Sequence[Sequence[Known]],
        wrong: Sequence[Bad],
        mixture: Mixture,
        *,
        timeout: float,
        seed: int,
    ) -> None:
        self._http, self._singles, self._sessions, self._wrong, self._mixture = http, singles, sessions, wrong, mixture
        self._each = cycle(singles)  # in turn, so that a short run, or a slow machine, comes to all of them
        self._timeout, self._seed = timeout, seed
        self._listed = [known for known in singles if isinstance(known.ask.body.get("prompt"), list)]
        self._known = Sent()
        self.tally = Tally()
        self.habits: dict[Callable[[str, Random], Awaitable[None]], int] = {
            self._answer: 40,
            self._session: 6,
            self._sample: 6,
            self._leave: 12,
            self._hang_up: 6,
            self._err: 12,
            self._secret: 6,
            self._pin: 5,
            self._warm: 3,
            self._tokenize: 3,
            self._look: 4,
        }

    async def client(self, number: int, until: float) -> None:
        """One client, until that time of `time.monotonic`; what it has begun it ends."""
        random = Random(f"{self._seed} client {number}")
        habits, weights = list(self.habits), list(self.habits.values())
        while time.monotonic() < until and not self.tally.hopeless:
            [habit] = random.choices(habits, weights)
            await habit(random.choice(TENANTS), random)

    # ---- good requests

    async def _answer(self, tenant: str, random: Random) -> None:
        await self._compare(tenant, next(self._each), random)

    async def _session(self, tenant: str, random: Random) -> None:
        for turn in random.choice(self._sessions):
            await self._compare(tenant, turn, random)

    async def _compare(self, tenant: str, known: Known, random: Random) -> None:
        ask = known.ask
        if random.random() < 0.5:
            ask = ask.but(stream=True, stream_options={"include_usage": True})
        found = await self._ask(tenant, ask, known.prompt, known.tokens)
        if found is not None:
            self.tally.compared += 1
            if (texts := found.texts(ask.rows)) != known.texts:
                self.tally.violation("wrong answer", f"{ask.kind}: {texts!r} instead of {known.texts!r}")

    async def _sample(self, tenant: str, random: Random) -> None:
        """Answers that differ from each other, and grow in pages of their own."""
        known, sizes = random.choice(self._listed), self._mixture.sizes
        varied = known.ask.but(temperature=1.0, seed=random.randrange(2**32), n=sizes.rows, max_tokens=sizes.growing)
        await self._ask(tenant, replace(varied, kind="sampled"), known.prompt, known.prompt)

    async def _secret(self, tenant: str, random: Random) -> None:
        """What one tenant has just cached, the other one must compute."""
        ask = self._mixture.secret()
        prompt = tuple(ask.body["prompt"])
        other = TENANTS[1 - TENANTS.index(tenant)]
        for who in (tenant, tenant, other):
            await self._ask(who, ask, prompt, prompt)

    async def _ask(self, tenant: str, ask: Ask, prompt: Sequence[int], tokens: Sequence[int]) -> Heard | None:
        """`tokens` are those that the cache may know afterwards. None: it failed, which is noted."""
        foreign = max(self._known.reach(other, prompt) for other in TENANTS if other != tenant)
        self._known.note(tenant, tokens)
        found = await self._send(tenant, ask.kind, ask.path, lambda http: send(http, ask))
        if found is None:
            return None
        if found.finished != ask.rows:
            self.tally.violation("wrong answer", f"{ask.kind}: {found.finished} of {ask.rows} answers ended; {found.bodies[-1]}"[:500])
            return None
        # Only now: of two that were sent at about the same time, either may have been the first to be computed.
        own = self._known.reach(tenant, prompt, apart_from=tokens)
        self.tally.hits += found.cached > 0
        self.tally.tempted += foreign > own
        if found.cached > own:
            self.tally.violation("foreign tokens", f"{ask.kind}: {found.cached} cached of which tenant {tenant} had sent only {own}")
        return found

    # ---- clients that leave

    async def _leave(self, tenant: str, random: Random) -> None:
        """In the middle of a stream."""
        known = random.choice(self._singles)
        self._known.note(tenant, known.tokens)
        events = random.randint(1, LEAVES_AFTER)

        async def some(http: httpx.AsyncClient) -> Heard:
            async with http.stream("POST", known.ask.path, json={**known.ask.body, "stream": True}) as response:
                left = events
                async for _ in response.aiter_raw():
                    if (left := left - 1) <= 0:
                        break
                return Heard(response.status_code, ())

        await self._send(tenant, "left in a stream", known.ask.path, some)

    async def _hang_up(self, tenant: str, random: Random) -> None:
        """Before the answer is there, or at about that time."""
        known, patience = random.choice(self._singles), random.uniform(0, PATIENCE)
        self._known.note(tenant, known.tokens)

        async def briefly(http: httpx.AsyncClient) -> Heard:
            try:
                async with asyncio.timeout(patience):
                    return await send(http, known.ask)
            except TimeoutError:
                return Heard(200, ())

        await self._send(tenant, "hung up", known.ask.path, briefly)

    # ---- all the rest

    async def _err(self, tenant: str, random: Random) -> None:
        bad = random.choice(self._wrong)
        who = tenant if bad.credential == "own" else bad.credential
        headers = {"content-type": "application/json"}

        async def post(http: httpx.AsyncClient) -> Heard:
            return heard(await http.post(bad.path, content=bad.content, headers=headers))

        found = await self._send(who, "invalid", bad.path, post, {bad.status})
        if found is not None and "error" not in found.bodies[0]:
            self.tally.violation("wrong status", f"{bad.name}: no error in the body")

    async def _pin(self, tenant: str, random: Random) -> None:
        known = random.choice(self._listed)
        self._known.note(tenant, known.prompt)
        found = await self._post(tenant, "pin", "/v1/cache/pin", {"prompt": list(known.prompt), "ttl": "10m"}, {200, 400})
        if found is None or found.status == 400:
            if found is not None and found.bodies[0]["error"]["code"] != QUOTA:
                self.tally.violation("wrong status", f"pin: {complaint(found.bodies[0])}")
            return
        try:
            await self._compare(tenant, known, random)
        finally:
            gone = await self._post(tenant, "unpin", "/v1/cache/unpin", {"id": found.bodies[0]["id"]})
        if gone is not None and not gone.bodies[0]["unpinned"]:
            self.tally.violation("wrong answer", "unpin: the pin was lost")

    async def _warm(self, tenant: str, random: Random) -> None:
        known = random.choice(self._listed)
        self._known.note(tenant, known.prompt)
        await self._post(tenant, "warm", "/v1/cache/warm", {"prompt": list(known.prompt)})

    async def _tokenize(self, tenant: str, random: Random) -> None:
        known = random.choice([known for known in self._singles if known.ask.kind == "text"])
        found = await self._post(tenant, "tokenize", "/tokenize", {"prompt": known.ask.body["prompt"]})
        if found is not None and tuple(found.bodies[0]["tokens"]) != known.prompt:
            self.tally.violation("wrong answer", f"tokenize: {found.bodies[0]['tokens']} instead of {known.prompt}")
        await self._post(tenant, "detokenize", "/detokenize", {"tokens": list(known.prompt)})

    async def _look(self, tenant: str, random: Random) -> None:
        path = random.choice(WHERE)

        async def get(http: httpx.AsyncClient) -> Heard:
            return heard(await http.get(path))

        await self._send(tenant, "look", path, get)

    # ---- sending

    async def _post(self, tenant: str, kind: str, path: str, body: dict[str, object], allowed: Set[int] = FINE) -> Heard | None:
        return await self._send(tenant, kind, path, lambda http: send(http, Ask(kind, path, body)), allowed)

    async def _send(self, who: str, kind: str, path: str, how: How, allowed: Set[int] = FINE) -> Heard | None:
        """None: nothing came, or something else than what is allowed; either is noted."""
        self.tally.sent[kind] += 1
        try:
            async with asyncio.timeout(self._timeout):
                found = await how(self._http[who])
        except TimeoutError:
            self.tally.came["no answer"] += 1
            self.tally.violation("stuck", f"{kind}: {path} did not end within {self._timeout:g} s")
            return None
        except (httpx.RequestError, ValueError) as error:
            self.tally.came["broken"] += 1
            self.tally.violation("connection broke", f"{kind}: {path}: {type(error).__name__}: {error}"[:500])
            return None
        self.tally.came[str(found.status)] += 1
        if found.status in allowed:
            return found
        said = complaint(found.bodies[0]) if found.bodies else ""
        wanted = " or ".join(map(str, sorted(allowed)))
        what: Violation = "server error" if found.status >= 500 else "wrong status"
        self.tally.violation(what, f"{kind}: {path}: {found.status} instead of {wanted}: {said}")
        return None
