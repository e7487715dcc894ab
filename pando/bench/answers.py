"""Questions over paragraphs as modules: how near the answers are to those of the plain prompts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from xml.sax.saxutils import escape

from ..config import EngineConfig
from ..engine.schemas import Schemas
from ..errors import InvalidOption
from ..markup.binding import Bound
from ..model.load import Model
from .judge import Distance, Judge
from .measure import Result, at_most
from .quality import ENCODES, REPAIRS, Way

FILE = "xquad_en.json"
TOKENS = 16  # of an answer
SHARE = 0.15  # of the tokens repaired, for which a bound was promised
MOST = 0.03  # nats per answer token
PARAGRAPHS = (1, 4)  # of a prompt
LEFT_OUT = 2  # paragraphs of a schema
FEWEST = max(PARAGRAPHS) + LEFT_OUT


@dataclass(frozen=True)
class Paragraph:
    text: str
    questions: tuple[str, ...]


def read_questions(folder: Path) -> list[Paragraph]:
    file = folder / FILE
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        texts = [paragraph for article in raw["data"] for paragraph in article["paragraphs"]]
        return [Paragraph(each["context"], tuple(one["question"] for one in each["qas"])) for each in texts if each["qas"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidOption(f"{file} is not there, or not in SQuAD's form ({type(error).__name__}: {error})") from None


def ways() -> list[Way]:
    return [Way(encode, share) for encode in ENCODES for share in sorted({*REPAIRS, SHARE})]


def compare_answers(model: Model, paragraphs: Sequence[Paragraph], each: int, count: int, seed: int) -> list[Result]:
    """`count` questions, each over the paragraph that answers it among others, `each` of them in one prompt."""
    judge = Judge(model, EngineConfig(disk_gib=0), TOKENS)
    totals = measured(judge, paragraphs, each, count, seed, ways())
    case = f"KL, {each} paragraph{'s' * (each > 1)}, "
    return [_result(case, way, found, each) for way, found in totals.items()]


def measured(judge: Judge, paragraphs: Sequence[Paragraph], each: int, count: int, seed: int, ways: Sequence[Way]) -> dict[Way, Distance]:
    random, totals = Random(f"{seed} {each}"), dict.fromkeys(ways, Distance())
    for _ in range(count):
        asked = _ask(paragraphs, each, random)
        bound = {encode: _bind(judge, paragraphs, asked, encode or "opening") for encode in {way.encode for way in ways}}
        reference = judge.reference(bound[ways[0].encode].runs)
        for way in ways:
            totals[way] += judge.distance(bound[way.encode].runs, reference, way.repair)
    return totals


@dataclass(frozen=True)
class Asked:
    question: str
    schema: tuple[int, ...]  # paragraphs
    imported: tuple[int, ...]


def _ask(paragraphs: Sequence[Paragraph], each: int, random: Random) -> Asked:
    """A question over its paragraph among others; the schema has some that are left out, or a causal one would be exact."""
    right = random.randrange(len(paragraphs))
    others = random.sample([i for i in range(len(paragraphs)) if i != right], each - 1 + LEFT_OUT)
    imported = tuple(sorted([right, *others[: each - 1]]))
    return Asked(random.choice(paragraphs[right].questions), tuple(sorted([right, *others])), imported)


def _bind(judge: Judge, paragraphs: Sequence[Paragraph], asked: Asked, encode: str) -> Bound:
    modules = "".join(f'<module name="p{i}">{escape(paragraphs[i].text)}\n\n</module>' for i in asked.schema)
    schemas = Schemas(judge.engine)
    schemas.add(f'<schema name="qa" encode="{encode}">Answer the question in a few words.\n\n{modules}</schema>')
    imports = "".join(f"<p{i}/>" for i in asked.imported)
    return schemas.bind(f'<prompt schema="qa">{imports}Question: {escape(asked.question)}\nAnswer:</prompt>')[1]


def _result(case: str, way: Way, found: Distance, each: int) -> Result:
    name = f"{case}{way.encode}, repair {way.repair:g}"
    note = f"same top token {found.agreement:.1%}, perplexity {found.perplexity:.3f}, {found.repaired} of {found.foreign} tokens repaired"
    most = 1e-4 if way.repair == 1 else MOST if way == Way("opening", SHARE) and each > 1 else None
    return at_most(name, found.kl, "nats", most, note)
