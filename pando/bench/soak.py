"""`pando bench soak`: mixed load on a small server, good and bad, of two tenants; whatever goes wrong or is not given back is told."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict

import httpx

from ..flags import Parser, written_file
from .client import connect
from .crowd import TENANTS, Crowd, alone, session
from .host import Gone, Site, Vitals, chosen, hosted, last_words, vitals
from .ledger import Counts, Observed, Sample, counts, judge
from .measure import Result, table, write_json
from .mixture import Known, Mixture, Sizes, bad
from .options import decimal, whole
from .subject import add_name
from .traffic import VOCABULARY

EXIT_VIOLATED = 1
ALONE = "alone"  # the tenant whose answers are what the others must get
WARM_UP = 60.0  # seconds, or a quarter of a shorter run
REST = 60.0  # seconds that the server may take to come to rest
BODY_MIB = 1
SHOWN_COUNTERS = ("pando_requests_total", "pando_prompt_tokens_total", "pando_cache_", "pando_preemptions_total", "pando_steps_total")
# A pool that eight clients cannot share without taking pages from each other.
SERVER = (
    *("--dtype", "float32", "--page-size", "16", "--kv-cache-tokens", "512", "--max-num-seqs", "8", "--max-num-batched-tokens", "128"),
    *("--max-body-mib", str(BODY_MIB), "--log-level", "error", "--disable-log-requests"),
)


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    keys = {name: secrets.token_urlsafe() for name in (*TENANTS, ALONE)}
    with contextlib.ExitStack() as stack:
        model, options = stack.enter_context(chosen(arguments.model, arguments.random_weights))
        print("starting the server ...", flush=True)
        environ = {"PANDO_API_KEY": ",".join(keys.values())}
        site = stack.enter_context(hosted(model, [*SERVER, *options, "--served-model-name", "soak"], environ))
        soak = Soak(
            site, keys, seconds=arguments.minutes * 60, clients=arguments.clients, timeout=arguments.timeout, seed=arguments.seed,
            margin=arguments.margin_mib,
        )  # fmt: skip
        try:
            seen = asyncio.run(soak.run())
        except Gone as error:
            print(f"\nthe server is gone: {error}", flush=True)
            return EXIT_VIOLATED
    results = judge(seen)
    print(report(seen, results))
    write_json(arguments.json, as_json(seen, results, argv))
    return EXIT_VIOLATED if any(result.met is False for result in results) else 0


class Soak:
    """One run against one server."""

    def __init__(
        self,
        site: Site,
        keys: dict[str, str],
        *,
        seconds: float,
        clients: int,
        timeout: float,
        seed: int,
        margin: int,
        sizes: Sizes | None = None,
    ) -> None:
        self._site, self._keys, self._sizes = site, keys, sizes or Sizes()
        self._seconds, self._clients, self._timeout, self._seed, self._margin = seconds, clients, timeout, seed, margin
        self._samples: list[Sample] = []

    async def run(self) -> Observed:
        async with self._connect(self._keys[ALONE]) as watch:
            mixture, context = await self._acquaint(watch)
            singles, sessions = await self._references(mixture)
            before, idle = await self._rest(watch, None)
            async with contextlib.AsyncExitStack() as stack:
                http = {name: await stack.enter_async_context(self._connect(self._keys[name])) for name in TENANTS}
                http |= {name: await stack.enter_async_context(self._connect(key)) for name, key in (("none", ""), ("wrong", "wrong"))}
                crowd = Crowd(
                    http, singles, sessions, bad(context, BODY_MIB << 20), mixture, timeout=self._timeout, seed=self._seed
                )  # fmt: skip
                await self._load(crowd)
            after, end = await self._rest(watch, idle)
        lines = self._site.log.read_text(encoding="utf-8", errors="replace").splitlines()
        warm_up = min(WARM_UP, self._seconds / 4)
        return Observed(crowd.tally, before, after, idle, self._samples, end, len(lines), warm_up, self._margin)

    def _connect(self, key: str) -> httpx.AsyncClient:
        http = connect(key)
        http.base_url = httpx.URL(self._site.url)
        return http

    async def _acquaint(self, http: httpx.AsyncClient) -> tuple[Mixture, int]:
        """Prompts are made of the model's own tokens for plain words."""
        models = (await http.get("/v1/models")).raise_for_status().json()
        words = (await http.post("/tokenize", json={"prompt": VOCABULARY})).raise_for_status().json()
        ids = sorted(set(words["tokens"]))
        return Mixture(ids, self._sizes, self._seed), models["data"][0]["max_model_len"]

    async def _references(self, mixture: Mixture) -> tuple[list[Known], list[list[Known]]]:
        """Every request one after the other, on an idle server: what it is answered under load must be the same."""
        asks, openings = mixture.singles(), mixture.openings()
        print(f"asking {len(asks)} requests and {len(openings)} sessions on an idle server ...", flush=True)
        async with self._connect(self._keys[ALONE]) as http:
            singles = [await alone(http, ask) for ask in asks]
            return singles, [await session(http, mixture, messages) for messages in openings]

    async def _load(self, crowd: Crowd) -> None:
        start = time.monotonic()
        watching = asyncio.ensure_future(self._watch(crowd, start))
        try:
            await asyncio.gather(*(crowd.client(number, start + self._seconds) for number in range(self._clients)))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)  # that the server is gone is found out again, at rest

    async def _watch(self, crowd: Crowd, start: float) -> None:
        pause = min(10.0, self._seconds / 24)
        while True:
            await asyncio.sleep(pause)
            now, found = time.monotonic() - start, vitals(self._site.pid)
            self._samples.append(Sample(round(now, 1), found))
            tally = crowd.tally
            print(
                f"{now:6.0f} s  {tally.sent.total():6d} sent  {tally.compared:6d} compared  {tally.violations.total():3d} violations  "
                f"{found.rss:6d} MiB  {found.threads:3d} threads  {found.files:4d} files",
                flush=True,
            )

    async def _rest(self, http: httpx.AsyncClient, idle: Vitals | None) -> tuple[Counts, Vitals]:
        """Counters and vitals once nothing runs and closed connections are gone; or, if that does not come, as they are then."""
        end = time.monotonic() + REST
        while True:
            try:
                found = counts((await http.get("/metrics")).raise_for_status().text)
            except httpx.HTTPError as error:
                raise Gone(f"{type(error).__name__}: {error}; the end of its log: {last_words(self._site.log)}") from error
            held, lost = vitals(self._site.pid), found["pando_pages_in_use"] - found["pando_pages_cached"]
            busy = found["pando_requests_running"] + found["pando_requests_waiting"] + found["pando_pages_pinned"] + abs(lost)
            if time.monotonic() > end or not (busy or (idle and held.files > idle.files)):
                return found, held
            await asyncio.sleep(0.1)


def report(seen: Observed, results: Sequence[Result]) -> str:
    tally = seen.tally
    parts = [
        "",
        "sent   " + "  ".join(f"{kind} {count}" for kind, count in tally.sent.most_common()),
        "came   " + "  ".join(f"{what} {count}" for what, count in tally.came.most_common()),
        "",
        "counter, before, after",
        *(
            f"  {name:<52} {seen.before.get(name, 0):>10g} {seen.after[name]:>10g}"
            for name in seen.after
            if name.startswith(SHOWN_COUNTERS)
        ),
        "",
        table(results),
    ]
    for what, examples in tally.examples.items():
        parts += ["", f"{what}: {tally.violations[what]}, such as", *(f"  {example}" for example in examples)]
    return "\n".join(parts)


def as_json(seen: Observed, results: Sequence[Result], argv: Sequence[str]) -> dict[str, object]:
    return {
        "command": " ".join(["pando bench soak", *argv]),
        "sent": dict(seen.tally.sent),
        "came": dict(seen.tally.came),
        "violations": seen.tally.examples,
        "samples": [asdict(sample) for sample in seen.samples],
        "before": dict(seen.before),
        "after": dict(seen.after),
        "checks": [asdict(result) for result in results],
    }


def _parser() -> Parser:
    about = (
        "Load a small server with two tenants and requests of every kind; check that all answers are right and everything is given back."
    )
    parser = Parser(prog="pando bench soak", description=about)
    parser.add_argument("--minutes", type=decimal(), default=10.0, metavar="N", help="how long the load lasts (10)")
    parser.add_argument("--clients", type=whole(1), default=8, metavar="N", help="clients at the same time (8)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all random choices (0)")
    parser.add_argument("--timeout", type=decimal(), default=120.0, metavar="S", help="seconds after which a request counts as stuck (120)")
    parser.add_argument("--margin-mib", type=int, default=64, metavar="N", help="MiB that memory may grow after the warm-up (64)")
    add_name(parser)
    parser.add_argument("--json", type=written_file, metavar="FILE", help="write every sample and counter, too")
    return parser
