"""`pando bench modules`: how soon a prompt made of modules is answered, and how well.

Modules in the pool against the same prompt with nothing cached, and against its new words alone; for growing imports; and how long a large
schema takes to read. With a folder that has `xquad_en.json` (Wikipedia paragraphs with questions), how near the answers are to those of the
plain prompts.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from ..config import EngineConfig
from ..engine.graphs import SEEN_WITH_PROMPTS
from ..engine.llm import LLM
from ..engine.schemas import Prompt
from ..engine.words import Words
from ..errors import InvalidOption
from ..flags import Parser, written_file
from ..markup.schema import read_schema
from .answers import FEWEST, PARAGRAPHS, compare_answers, read_questions
from .measure import Result, at_most, compared, finish, interleave, show, told
from .options import picture, whole
from .picture import figure_in
from .subject import add_model, facts_of, model_of, named
from .traffic import VOCABULARY
from .trial import first_token

COLD, ALONE, MODULAR = "cold", "new words alone", "modules"
PIECE = 512  # tokens of a module
TARGETS = {"cpu": 30.0, "cuda": 10.0}  # times sooner than cold
MOST = 1.5  # times the new words alone
READ_MS = 100.0
WARMED = 4  # times on a GPU


@dataclass(frozen=True)
class Sizes:
    imports: tuple[int, ...] = (1, 2, 4, 8, 14)  # modules of a prompt
    headline: int = 10  # modules of the prompt that the targets are for: 5,000 tokens and more
    piece: int = PIECE
    new: int = 30  # tokens
    repeats: int = 5
    modules: int = 1000  # of a schema that is read


QUICK = Sizes(imports=(1, 2), headline=2, piece=24, new=6, repeats=2, modules=50)


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    questions = read_questions(arguments.data) if arguments.data else []
    if arguments.data and len(questions) < FEWEST:
        raise InvalidOption(f"--data {arguments.data}: {len(questions)} paragraphs with questions, and a schema takes {FEWEST}; give more")
    model, name, sizes = model_of(arguments), named(arguments), QUICK if arguments.quick else Sizes()
    sizes = replace(sizes, repeats=arguments.repeats or sizes.repeats)
    facts = facts_of(name, model, " ".join(["pando bench modules", *argv]))
    show(facts)
    bench = Bench(LLM.from_config(EngineConfig(model=arguments.model, disk_gib=0), model), sizes)
    results = told(bench.reading(), judged=not arguments.quick)
    results += told(bench.first_token(), judged=not arguments.quick)
    curve = told(bench.curve())
    results += curve
    if arguments.plot:
        draw(curve, f"{name} on {model.device}, {sizes.new} new tokens", arguments.plot)
    if questions:
        del bench  # its pool is needed
        gc.collect()
        for paragraphs in PARAGRAPHS:
            results += told(compare_answers(model, questions, paragraphs, arguments.questions, arguments.seed))
    finish(facts, results, arguments.json)
    return 0


@dataclass
class Bench:
    llm: LLM
    sizes: Sizes
    random: Random = field(default_factory=lambda: Random("modules"))

    def __post_init__(self) -> None:
        self._words = VOCABULARY.split()
        count = max(*self.sizes.imports, self.sizes.headline)
        modules = "".join(f'<module name="m{i}">{self._text(self.sizes.piece)}</module>\n' for i in range(count))
        opening = "Read what follows and answer."
        self.llm.schemas.add(f'<schema name="bench">{opening}\n{modules}</schema>', eager=True)
        self._fresh = iter(range(self.llm.engine.model.config.vocab_size - 1, -1, -1))

    def first_token(self) -> list[Result]:
        samples, tokens = self._timed(self.sizes.headline)
        case, target = f"first token, {tokens} tokens of modules", TARGETS[self.llm.engine.model.device.type]
        found = {name: samples[name] for name in (MODULAR, COLD)}
        medians = {name: statistics.median(each) for name, each in samples.items()}
        first = compared(case, found, "ms", ours=MODULAR, higher=False, at_least=target)
        times = medians[MODULAR] / medians[ALONE]
        return [first, at_most("the same against its new words alone", times, "times", MOST, _ms(medians))]

    def curve(self) -> list[Result]:
        results = []
        for count in self.sizes.imports:
            samples, tokens = self._timed(count)
            note = _ms({name: statistics.median(each) for name, each in samples.items()})
            found = {name: samples[name] for name in (MODULAR, COLD)}
            result = compared(f"first token, {tokens} tokens", found, "ms", ours=MODULAR, higher=False, at_least=None, note=note)
            results.append(result)
        return results

    def reading(self) -> list[Result]:
        """Parse and layout of a schema of many small modules, every one of which a prompt imports."""
        words, times = Words(self.llm.tokenizer), []
        for _ in range(self.sizes.repeats):
            modules = "".join(f'<module name="m{i}">{self._text(8)}</module>\n' for i in range(self.sizes.modules))
            pml = f'<schema name="many">Read.\n{modules}</schema>'
            start = time.perf_counter()
            schema = read_schema(pml, words, movable=True, max_len=2**31 - 1)
            times.append(1000 * (time.perf_counter() - start))
        case = f"reading and laying out {len(schema.modules) - 1} modules"
        return [at_most(case, statistics.median(times), "ms", READ_MS)]

    def _timed(self, count: int) -> tuple[dict[str, list[float]], int]:
        """Milliseconds to the first token, each way in turn; and how many tokens come from modules. New words are new every time."""
        _, bound = self.llm.schemas.bind(self._prompt(count))
        runs: dict[str, Callable[[], float]] = {
            MODULAR: lambda: first_token(self.llm, Prompt(self._prompt(count)))[0],
            ALONE: lambda: first_token(self.llm, self._new())[0],
            COLD: lambda: first_token(self.llm, plain(self.llm, self._prompt(count), next(self._fresh)))[0],
        }
        on_gpu = self.llm.engine.model.device.type == "cuda"
        interleave(runs, WARMED if on_gpu else 1)  # kernels are compiled, and steps captured, when they are first met
        interleave({name: runs[name] for name in (MODULAR, ALONE)}, SEEN_WITH_PROMPTS if on_gpu else 0)
        return interleave(runs, self.sizes.repeats), bound.module_tokens

    def _prompt(self, count: int) -> str:
        return '<prompt schema="bench">' + "".join(f"<m{i}/>" for i in range(count)) + f" {self._text(self.sizes.new)}</prompt>"

    def _new(self) -> list[int]:
        return self.llm.tokenizer.encode(self._text(self.sizes.new))

    def _text(self, tokens: int) -> str:
        """Words that come to so many tokens; where a letter is one, the last word may be cut."""
        words = self.random.choices(self._words, k=tokens)
        encode = self.llm.tokenizer.encode
        low, high = 1, tokens
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if len(encode(" ".join(words[:middle]))) < tokens else (low, middle)
        text = " ".join(words[:low])
        return next(shorter for end in range(len(text), 0, -1) if len(encode(shorter := text[:end])) <= tokens)


def plain(llm: LLM, prompt: str, first: int) -> list[int]:
    """The tokens of a prompt, of which nothing is cached: the first one is another."""
    _, bound = llm.schemas.bind(prompt)
    return [first, *[token for run in bound.runs for token in run.tokens][1:]]


def _ms(medians: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f} ms" for name, value in medians.items())


def draw(curve: Sequence[Result], title: str, file: Path) -> None:
    with figure_in(file, title, 7, 4.5) as figure:
        axis = figure.subplots()
        tokens = [int(result.case.split()[2]) for result in curve]
        for name in (COLD, MODULAR):
            axis.plot(tokens, [statistics.median(result.samples[name]) for result in curve], marker="o", label=name)
        axis.set(xlabel="tokens of modules in the prompt", ylabel="time to first token, ms", yscale="log")
        axis.grid(alpha=0.3)
        axis.legend()


def _parser() -> argparse.ArgumentParser:
    about = "Measure prompts made of modules: the time to the first token, and how close answers are to those of plain prompts."
    parser = Parser(prog="pando bench modules", description=about)
    add_model(parser)
    parser.add_argument("--repeats", type=whole(1), metavar="N", help=f"runs of each timing; medians count ({Sizes.repeats})")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it runs; the numbers mean little")
    parser.add_argument("--data", type=Path, metavar="DIR", help="a folder with xquad_en.json: compare answers, too")
    parser.add_argument("--questions", type=whole(1), default=100, metavar="N", help="how many questions to ask (100)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which questions (0)")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw the time to the first token over the tokens of modules")
    parser.add_argument("--json", type=written_file, metavar="FILE", help="write every sample, too")
    return parser
