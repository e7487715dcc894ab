"""The cases of `pando bench`: ours and the baseline's runs of each, taken in turns."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..engine.llm import LLM
from ..engine.request import Request, RequestOutput, SamplingParams
from ..errors import InvalidOption
from ..kv.segment import shared_length
from ..model.hub import resolve
from .baseline import Baseline, usable
from .measure import Result, Samples, at_most, compared, counted, interleave, paired, passing, worthwhile
from .modules import QUICK as FEW_MODULES
from .modules import Bench, Sizes
from .trial import ask, greedy
from .workloads import Texts, prefix, questions, windows

OURS, FLAT = "Pando", "Pando, flat"
PROBE_TOKENS = 4
CLEARLY_SLOWER = 2  # a variant of the baseline this many times slower than its best, when probed, is not measured further
CLOSE = 5  # times as many runs where a difference of 2 % counts
TIE = 1e-4  # a gap of logits below this is rounding, and is reported as such
SYSTEM = "Answer questions about the following text, or about anything else, in one short paragraph.\n\n"


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    repeats: int
    chats: int
    system_tokens: int  # that all chats share
    answer: int  # tokens
    prefix: int
    rows: int
    few: int  # rows of a small batch
    own: int  # tokens of each of these where nothing is shared
    question: int
    new: int  # tokens after the cached prefix, where the time to the first token is measured
    scored_tokens: int | None  # None: the whole text
    window: int
    modules: Sizes


FULL = Size(
    repeats=3, chats=32, system_tokens=2048, answer=64, prefix=2048, rows=32, few=8, own=512, question=16, new=32, scored_tokens=16384,
    window=2048, modules=Sizes(),
)  # fmt: skip
QUICK = Size(
    repeats=1, chats=3, system_tokens=96, answer=8, prefix=256, rows=4, few=2, own=64, question=16, new=32, scored_tokens=512, window=256,
    modules=FEW_MODULES,
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Everything loaded. `llm` runs in its own choice of dtype, `exact` in float32: one and the same where that is the choice."""

    llm: LLM
    exact: LLM
    baselines: list[Baseline]  # float32 first
    texts: Texts
    size: Size

    def encode(self, text: str) -> list[int]:
        return self.llm.tokenizer.encode(text, special=False)

    def facts(self) -> dict[str, str | int]:
        sources = {f"{name} text": source for name, source in self.texts.sources.items()}
        dtype = str(self.llm.engine.model.dtype).removeprefix("torch.")
        return {"Pando runs in": dtype, "beside": ", ".join(baseline.name for baseline in self.baselines), **sources}


def prepare(model: str, texts: Texts, size: Size, threads: int) -> Setting:
    torch.set_num_threads(threads)
    directory = resolve(model).directory
    llm = LLM(str(directory), device="cpu", threads=threads)
    same = llm.engine.model.dtype == torch.float32
    exact = llm if same else LLM(str(directory), device="cpu", dtype="float32", threads=threads)
    setting = Setting(llm, exact, usable(directory, [1] * 8), texts, size)
    serve(llm, [[1] * 8], 2)  # both sides have run once before anything is timed
    return setting


@dataclass(frozen=True)
class Served:
    rate: float  # tokens per second while all of them were decoding
    pages: int  # most in use


def serve(llm: LLM, prompts: Sequence[Sequence[int]], count: int) -> Served:
    """Runs requests together, each for `count` tokens after its first."""
    engine = llm.engine
    for i, prompt in enumerate(prompts):
        engine.add(Request(f"bench-{i}", prompt, greedy(count + 1)))
    began = set[str]()
    decoded, finished, pages = 0, False, 0
    started = ended = math.nan
    while engine.has_work:
        events = engine.step()
        now = time.perf_counter()
        pages = max(pages, engine.pages_in_use)
        if len(began) < len(prompts):
            began |= {event.request_id for event in events}
            started = now
        elif not finished:
            decoded += len(events)
            ended = now
        finished |= any(event.finish_reason for event in events)
    return Served(decoded / (ended - started), pages)


def decode_alone(setting: Setting) -> list[Result]:
    size = setting.size
    [prompt] = questions(setting.encode, setting.texts.prompts, 1, size.question)
    runs: dict[str, Callable[[], float]] = {OURS: lambda: serve(setting.llm, [prompt], size.answer).rate}
    for baseline in setting.baselines:
        runs[f"{baseline.name}, generate"] = partial(baseline.time_generate, prompt, size.answer)
        runs[f"{baseline.name}, bare loop"] = partial(baseline.time_decode, prompt, size.answer)
    samples = interleave(runs, size.repeats, shown=True)
    return [compared("decode, batch 1, short context", samples, "tokens/s", ours=OURS, higher=True, at_least=1.6)]


def flattened(llm: LLM) -> LLM:
    """The same weights under `--attention flat`: what requests share is stored once and computed once, but read by each row for itself."""
    return LLM.from_config(replace(llm.config, attention="flat"), llm.engine.model)


def decode_shared(setting: Setting) -> Iterator[Result]:
    size = setting.size
    shared = prefix(setting.encode, setting.texts.prose, size.prefix)
    kept = [(baseline, baseline.prefill(shared)[1]) for baseline in setting.baselines]
    ours = {OURS: setting.llm, FLAT: flattened(setting.llm)}
    for rows, over_theirs, over_flat in ((size.rows, 5, 2.5), (size.few, 3.4, None)):
        asked = questions(setting.encode, setting.texts.prompts, rows, size.question)
        variants: dict[str, Callable[[int], float]] = {}
        for baseline, cache in kept:
            variants[f"{baseline.name}, growing cache"] = partial(baseline.time_shared, cache, asked)
            variants[f"{baseline.name}, static cache"] = partial(baseline.time_shared_static, cache, asked)
        names, note = worthwhile({name: _probed(name, run) for name, run in variants.items()}, CLEARLY_SLOWER)
        runs = {name: partial(_shared_rate, llm, shared, asked, size.answer) for name, llm in ours.items()}
        runs |= {name: partial(variants[name], size.answer) for name in names}
        samples = interleave(runs, size.repeats, shown=True)
        case = f"decode, {rows} requests over {size.prefix} shared tokens"
        theirs = {name: rates for name, rates in samples.items() if name != FLAT}
        yield compared(case, theirs, "tokens/s", ours=OURS, higher=True, at_least=over_theirs, note=note)
        yield _against_flat(case, samples, over_flat, ours)


def _probed(name: str, run: Callable[[int], float]) -> float:
    passing(f"{name}, a short probe")
    return run(PROBE_TOKENS)


def decode_unshared(setting: Setting) -> Iterator[Result]:
    """Looking for what could be shared costs nothing where there is nothing."""
    size = setting.size
    ours = {OURS: setting.llm, FLAT: flattened(setting.llm)}
    for rows, length, owner in ((1, size.prefix, "its"), (size.few, size.own, "their")):
        asked = questions(setting.encode, setting.texts.prompts, rows, length)
        for llm in ours.values():
            llm.engine.clear_cache()
            serve(llm, asked, 1)  # from here on every row finds its own context cached
        runs = {name: partial(_rate, llm, asked, size.answer) for name, llm in ours.items()}
        samples = interleave(runs, CLOSE * size.repeats, shown=True)
        case = f"decode, batch {rows} over {length} tokens of {owner} own"
        yield _against_flat(case, samples, 0.98, ours)


def _against_flat(case: str, samples: Samples, at_least: float | None, ours: dict[str, LLM]) -> Result:
    """The note says whether the two did read differently."""
    note = "shared reads: " + ", ".join(f"{llm.engine.facts.shared_reads} ({name})" for name, llm in ours.items())
    return paired(f"{case}, against flat", samples, "tokens/s", ours=OURS, theirs=FLAT, at_least=at_least, note=note)


def _rate(llm: LLM, prompts: Sequence[Sequence[int]], count: int) -> float:
    return serve(llm, prompts, count).rate


def _shared_rate(llm: LLM, shared: Sequence[int], asked: Sequence[Sequence[int]], count: int) -> float:
    return _serve_shared(llm, shared, asked, count).rate


def _serve_shared(llm: LLM, shared: Sequence[int], asked: Sequence[Sequence[int]], count: int) -> Served:
    """Nothing but the prefix is cached when the requests arrive."""
    llm.engine.clear_cache()
    serve(llm, [shared], 0)
    return serve(llm, [[*shared, *question] for question in asked], count)


def prompt_modules(setting: Setting) -> list[Result]:
    """The first token of a prompt made of modules, and how soon a large schema is read; `pando bench modules` measures more of them."""
    bench = Bench(setting.llm, replace(setting.size.modules, repeats=setting.size.repeats))
    return [*bench.reading(), *bench.first_token()]


def pages_in_use(setting: Setting) -> list[Result]:
    size, page = setting.size, setting.llm.config.page_size
    shared = prefix(setting.encode, setting.texts.prose, size.prefix)
    asked = questions(setting.encode, setting.texts.prompts, size.rows, size.question)
    served = _serve_shared(setting.llm, shared, asked, size.answer)
    tail = size.question + size.answer + 1
    once = math.ceil(size.prefix / page) + size.rows * math.ceil(tail / page)
    apart = size.rows * math.ceil((size.prefix + tail) / page)
    case = f"pages of {page}, {size.rows} requests over one prefix"
    return [at_most(case, served.pages, "pages", once, "against no sharing at all", theirs=apart)]


def first_token(setting: Setting) -> list[Result]:
    size, llm = setting.size, setting.llm
    shared = prefix(setting.encode, setting.texts.prose, size.prefix)
    fresh = iter(questions(setting.encode, setting.texts.prompts, 2 * size.repeats + 2, size.new))
    cached_tokens = []

    def warm() -> float:
        trial = ask(llm.engine, [[*shared, *next(fresh)]])
        cached_tokens.append(trial.device)
        return trial.seconds

    def cold() -> float:
        llm.engine.clear_cache()
        return ask(llm.engine, [[*shared, *next(fresh)]]).seconds

    cold()  # leaves the prefix cached
    [new] = questions(setting.encode, setting.texts.prompts, 1, size.new)
    runs: dict[str, Callable[[], float]] = {"cached": warm, "cold": cold}
    for baseline in setting.baselines:
        kept = baseline.prefill(shared)[1]
        runs[f"{baseline.name}, cache kept"] = partial(baseline.time_first, new, kept)
        runs[f"{baseline.name}, cold"] = partial(baseline.time_first, [*shared, *new])
    samples = interleave(runs, size.repeats, shown=True)
    kept_runs = {name: times for name, times in samples.items() if name == "cached" or name.endswith("kept")}
    cold_runs = {name: times for name, times in samples.items() if name.endswith("cold")}
    case, note = f"first token, {size.prefix} cached and {size.new} new", f"{min(cached_tokens)} tokens came from the cache"
    own = {name: samples[name] for name in ("cached", "cold")}
    return [
        compared(f"{case}, our cold run", own, "s", ours="cached", higher=False, at_least=15, note=note),
        compared(case, kept_runs, "s", ours="cached", higher=False, at_least=2.5),
        compared(f"first token, {size.prefix + size.new} new", cold_runs, "s", ours="cold", higher=False, at_least=1),
    ]


def perplexity(setting: Setting) -> list[Result]:
    size, text = setting.size, setting.texts.scored
    wanted = size.scored_tokens
    tokens = setting.encode(text if wanted is None else text[: 16 * wanted])
    parts = windows(tokens, size.window, len(tokens) if wanted is None else wanted)
    count = sum(len(part) - 1 for part in parts)
    theirs = math.exp(-sum(setting.baselines[0].score(part) for part in parts) / count)
    results = []
    for llm in {id(llm): llm for llm in (setting.exact, setting.llm)}.values():
        ours = math.exp(-sum(math.fsum(llm.score(part)) for part in parts) / count)
        apart = abs(ours / theirs - 1)
        dtype = str(llm.engine.model.dtype).removeprefix("torch.")
        note = f"{apart:.2%} apart ({apart:.1e}); {count} tokens in windows of {size.window}"
        results.append(Result(f"perplexity, {dtype}", ours, "", theirs, target="within 0.1 %", met=apart <= 1e-3, note=note))
    return results


def greedy_text(setting: Setting) -> list[Result]:
    size, llm, reference = setting.size, setting.exact, setting.baselines[0]
    prompts = _chats(setting)
    expected = [reference.answer(prompt, size.answer) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=size.answer)

    def alone(clear: bool) -> list[RequestOutput]:
        outputs = []
        for prompt in prompts:
            if clear:
                llm.engine.clear_cache()
            outputs += llm.generate([prompt], params)
        return outputs

    def together(clear: bool) -> list[RequestOutput]:
        if clear:
            llm.engine.clear_cache()
        return llm.generate(prompts, params)

    modes = {"cold, alone": alone(True), "cached, alone": alone(False)}
    modes |= {f"cold, batch of {len(prompts)}": together(True), f"cached, batch of {len(prompts)}": together(False)}
    return [_equality(f"greedy text, {name}", outputs, expected, reference) for name, outputs in modes.items()]


def _chats(setting: Setting) -> list[list[int]]:
    size, tokenizer = setting.size, setting.exact.tokenizer
    text = tokenizer.decode(prefix(setting.encode, setting.texts.prose, size.system_tokens))
    users = setting.texts.prompts[: size.chats]
    if len(users) < size.chats:
        raise InvalidOption(f"the data has {len(users)} prompts, and {size.chats} are compared; name a folder with more")
    system = {"role": "system", "content": SYSTEM + text}
    return [tokenizer.encode(tokenizer.chat([system, {"role": "user", "content": user}])) for user in users]


def _equality(case: str, outputs: Sequence[RequestOutput], expected: Sequence[list[int]], reference: Baseline) -> Result:
    """How many answers are equal; of the first that is not, where it parts and how sure the reference was."""
    answers = [output.outputs[0].token_ids for output in outputs]
    differing = [i for i, (ours, theirs) in enumerate(zip(answers, expected, strict=True)) if ours != theirs]
    note = f"cached tokens: median {statistics.median(output.num_cached_tokens for output in outputs):g}"
    if differing:
        note += "; " + _parting(outputs[differing[0]].prompt_token_ids, answers[differing[0]], expected[differing[0]], reference)
    return counted(case, len(answers) - len(differing), len(answers), note)


def _parting(prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int], reference: Baseline) -> str:
    common = shared_length(ours, theirs)
    if common == min(len(ours), len(theirs)):
        return f"the first to differ ends after {len(ours)} tokens instead of {len(theirs)}"
    logits = reference.logits([*prompt, *theirs[:common]])[-1]
    gap = float(logits[theirs[common]] - logits[ours[common]])
    verdict = " (a tie)" if gap < TIE else ""
    return f"the first to differ parts at token {common}, where the reference's logits are {gap:.1e} apart{verdict}"
