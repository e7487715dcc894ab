"""Schemas through `LLM`: from PML to answers, and what of it is in the cache."""

import random
import signal
import threading
from contextlib import suppress
from typing import Annotated

import pytest

from pando import LLM, Prompt
from pando.engine.request import Request, Tenant, TokenEvent
from pando.errors import InvalidPrompt, MarkupError, PoolTooSmall
from pando.kv.run import Origin, Run
from pando.markup.binding import Bound
from pando.markup.program import Len, program
from pando.markup.schema import Schema
from pando.model.load import Model

from ..tiny import greedy, run, tiny_engine, tiny_llm, tiny_model

SCHEMA = """
<schema name="tour">
  You show people around.
  <module name="paris">Paris has a tower, a river and very many cats.</module>
  <module name="rome">Rome has a forum, and the cats are larger there.</module>
  <union>
    <module name="short">Answer in one word.</module>
    <module name="long">Answer at some length, and with care.</module>
  </union>
</schema>
"""
SCALINGS: dict[str, dict[str, float | str] | None] = {
    "rope": None,
    "linear": {"type": "linear", "factor": 4},
    "llama3": {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64},
    "yarn": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 128},
}
BOTH = '<prompt schema="tour"><paris/><rome/><short/> Where are the cats?</prompt>'


def model_of(positions: str) -> Model:
    return tiny_model(scaling=SCALINGS[positions]) if positions in SCALINGS else tiny_model(positions=positions)


def is_plain(llm: LLM, pml: str, text: str) -> None:
    """A prompt of modules is answered as its text, and says that nothing of it is an approximation."""
    output = llm.generate(Prompt(pml), greedy(12))[0]
    plain = tiny_llm(llm.engine.model).generate(text, greedy(12))[0]
    assert output.prompt_token_ids == plain.prompt_token_ids
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert output.reuse.modules == 0


def test_a_prompt_of_modules_is_answered_and_says_what_was_reused() -> None:
    llm = tiny_llm()
    llm.schemas.add(SCHEMA)
    first, again = (llm.generate(Prompt(BOTH), greedy(6))[0] for _ in range(2))
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens >= len(again.prompt_token_ids) - 8
    assert again.reuse.modules > 0, "the second module had not seen the first"
    text = llm.tokenizer.decode(again.prompt_token_ids)
    assert text.startswith("You show people around.Paris has a tower") and text.endswith("Where are the cats?")


def test_modules_are_encoded_when_they_are_first_asked_for_or_at_once() -> None:
    llm = tiny_llm()
    llm.schemas.add(SCHEMA)
    tenant = Tenant(llm.config.cache_salt.encode())
    assert {fact.state for fact in llm.schemas.facts(llm.schemas["tour"], tenant)} == {"not encoded"}
    llm.generate(Prompt('<prompt schema="tour"><rome/> Hello</prompt>'), greedy(2))
    states = {fact.path: (fact.state, fact.uses) for fact in llm.schemas.facts(llm.schemas["tour"], tenant)}
    assert states["rome"] == ("cached", 1)
    assert states["paris"] == ("not encoded", 0)
    llm.schemas.add(SCHEMA, eager=True)
    facts = llm.schemas.facts(llm.schemas["tour"], tenant)
    assert {fact.state for fact in facts} == {"cached"}
    rome = next(fact for fact in facts if fact.path == "rome")
    token = llm.engine.pool.nbytes // (llm.engine.pages.count * 4)
    assert (rome.tokens, rome.bytes) == (48, 48 * token)
    steps = llm.engine.steps
    llm.schemas.add(SCHEMA, eager=True)
    assert llm.engine.steps == steps, "registering the same schema again is free"


def test_a_schema_that_cannot_be_encoded_at_once_is_not_there() -> None:
    llm = tiny_llm(kv_cache_tokens=64)
    long, short = (f'<schema name="s">Open.<module name="a">{"x" * length}</module></schema>' for length in (100, 10))
    with pytest.raises(PoolTooSmall):
        llm.schemas.add(long, eager=True)
    assert llm.schemas.names() == []
    llm.schemas.add(short, eager=True)
    llm.schemas.remove("s")
    llm.schemas.add(long)
    with pytest.raises(PoolTooSmall):
        llm.schemas.add(long, eager=True)
    assert llm.schemas.names() == ["s"], "it was there before"


def test_ctrl_c_while_a_schema_is_encoded_at_once_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            llm.schemas.add(SCHEMA, eager=True)
    assert llm.schemas.names() == []
    llm.schemas.add(SCHEMA.replace("very many", "no"), eager=True)
    assert len(llm.generate(Prompt(BOTH), greedy(2))[0].outputs[0].token_ids) == 2


def test_a_changed_module_is_encoded_again_and_nothing_else() -> None:
    llm = tiny_llm()
    llm.schemas.add(SCHEMA, eager=True)
    other = SCHEMA.replace('name="tour"', 'name="tour2"').replace("very many cats", "few cats")
    before = llm.engine.totals.tokens
    llm.schemas.add(other, eager=True)
    assert llm.engine.totals.tokens - before == len("few cats."), "even of the changed module, what is before the change is known"


def test_a_prompt_in_a_batch_of_others_answers_the_same() -> None:
    llm = tiny_llm()
    llm.schemas.add(SCHEMA)
    prompts = [Prompt(BOTH), "plain", Prompt('<prompt schema="tour"><rome/><paris/></prompt>'.replace("<rome/><paris/>", "<rome/>Hm"))]
    alone = []
    for prompt in prompts:
        fresh = tiny_llm()
        fresh.schemas.add(SCHEMA)
        alone.append(fresh.generate(prompt, greedy(6))[0].outputs[0].token_ids)
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, greedy(6))] == alone


def test_streams_answers_and_logprobs_do_not_know_of_modules() -> None:
    llm = tiny_llm()
    llm.schemas.add(SCHEMA)
    output = llm.generate(Prompt(BOTH), greedy(5, n=2, logprobs=2))[0]
    assert len(output.outputs) == 2 and len(output.outputs[0].logprobs or []) == 5
    assert [event.token for event in llm.stream(Prompt(BOTH), greedy(5))] == output.outputs[0].token_ids


def test_a_schema_that_is_removed_is_unknown_and_what_was_asked_before_finishes() -> None:
    llm = tiny_llm()
    llm.schemas.add(SCHEMA)
    stream = llm.stream(Prompt(BOTH), greedy(6))
    assert llm.schemas.remove("tour") and not llm.schemas.remove("tour")
    assert len(list(stream)) == 6
    with pytest.raises(MarkupError, match="unknown schema 'tour'"):
        llm.generate(Prompt(BOTH))
    with pytest.raises(InvalidPrompt, match="there is no schema 'tour'"):
        llm.schemas["tour"]


def test_a_prompt_of_a_schema_that_is_replaced_meanwhile_is_no_use_of_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    schemas = tiny_llm().schemas
    old, bind = schemas.add(SCHEMA), schemas.library.bind

    def slowly(prompt: str, **how: str) -> tuple[Schema, Bound]:
        found = bind(prompt, **how)
        schemas.remove("tour")
        schemas.add(SCHEMA.replace("very many", "no"))
        return found

    monkeypatch.setattr(schemas.library, "bind", slowly)
    assert schemas.bind(BOTH)[0] is old
    assert schemas.uses(old) == 1 and schemas.uses(schemas["tour"]) == 0
    assert not any(module.uses for module in schemas.facts(schemas["tour"], Tenant()))


def test_of_two_registrations_of_one_name_at_the_same_moment_one_stays() -> None:
    llm = tiny_llm()
    texts = [SCHEMA.replace("very many", f"{n}") for n in range(8)]
    failures: list[str] = []

    def add(text: str) -> None:
        try:
            llm.schemas.add(text)
        except MarkupError as error:
            failures.append(str(error))

    threads = [threading.Thread(target=add, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) == 7 and all("in use by a schema with different content" in failure for failure in failures)
    assert llm.schemas.names() == ["tour"]


def test_a_model_whose_positions_are_learned_takes_the_fixed_layout() -> None:
    llm = tiny_llm(tiny_model(positions="learned"))
    assert llm.schemas.add(SCHEMA).layout == "fixed"
    assert llm.generate(Prompt('<prompt schema="tour"><rome/> Hello</prompt>'), greedy(3))[0].outputs[0].token_ids
    with pytest.raises(MarkupError, match="compact"):
        llm.schemas.add(SCHEMA.replace('name="tour"', 'name="other" layout="compact"'))


@pytest.mark.parametrize("positions", [*SCALINGS, "alibi", "learned"])
def test_the_whole_of_a_causal_schema_is_the_plain_prompt(positions: str) -> None:
    llm = tiny_llm(model_of(positions))
    llm.schemas.add(
        '<schema name="s" layout="fixed" encode="causal">'
        'One. <module name="a">Two, three.</module><module name="b"> Four.</module></schema>'
    )
    is_plain(llm, '<prompt schema="s"><a/><b/> And five?</prompt>', "One. Two, three. Four. And five?")


@pytest.mark.parametrize("positions", [*SCALINGS, "alibi"])
def test_a_module_at_eight_positions_answers_as_if_it_had_been_encoded_at_each(positions: str) -> None:
    """Together in one batch, from one set of states; and each alone, encoded there, behind an opening that stands as much further back."""
    model, text = model_of(positions), tuple(range(40, 80))

    def asked(place: int, *, there: bool) -> Request:
        moved = 7 * place if there else 0
        opening = Run(tuple(range(20)), moved, Origin((), moved))
        module = Run(text, 20 + 7 * place, Origin((opening,), 20 + moved))
        return Request(f"{place}", [90, 91 + place], greedy(4, logprobs=5), runs=[module])

    def scores(events: list[TokenEvent]) -> list[float]:
        return [score.logprob for event in events for _, score in sorted((event.logprobs or {}).items())]

    engine = tiny_engine(model)
    together = run(engine, [asked(place, there=False) for place in range(8)])
    assert sum(stem.segment.tokens[:4] == text[:4] for stem in engine.tree.stems()) == 1
    for place in range(8):
        alone = run(tiny_engine(model), [asked(place, there=True)])[f"{place}", 0]
        assert scores(together[f"{place}", 0]) == pytest.approx(scores(alone), abs=1e-4)


@pytest.mark.parametrize("positions", [*SCALINGS, "alibi", "learned"])
def test_a_hole_in_a_fixed_layout_leaves_everything_else_where_it_was(positions: str) -> None:
    """The answer is that of the same runs, given by hand at the positions that the schema has for them."""
    llm = tiny_llm(model_of(positions))
    schema = llm.schemas.add(SCHEMA.replace("<schema ", '<schema layout="fixed" '))
    output = llm.generate(Prompt('<prompt schema="tour"><rome/> Hello</prompt>'), greedy(6))[0]
    opening, rome = (next(part.runs[0] for part in schema.modules if part.path == path) for path in ("(opening)", "rome"))
    assert rome.position == len(opening) + len("Paris has a tower, a river and very many cats.")
    request = Request("x", llm.tokenizer.encode(" Hello", special=False), greedy(6), runs=[opening, rome], position=schema.laid.end)
    assert [event.token for event in run(tiny_engine(llm.engine.model), [request])["x", 0]] == output.outputs[0].token_ids


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_a_prompt_that_begins_with_a_hole_has_nothing_in_common_with_plain_ones(positions: str) -> None:
    """Nothing stands before its words, and they stand where no plain prompt begins: whatever comes first, each finds its own."""
    model = model_of(positions)
    asked = [Prompt('<prompt schema="s"> Question?</prompt>'), "The capital of France is Paris, and it is larger than the others.", "x"]

    def answers(order: list[int]) -> list[list[int]]:
        llm = tiny_llm(model)
        llm.schemas.add('<schema name="s" layout="fixed"><module name="a">A module of twenty-odd letters.</module></schema>')
        found = {place: llm.generate(asked[place], greedy(4))[0].outputs[0].token_ids for place in order}
        assert all(llm.generate(asked[place], greedy(4))[0].outputs[0].token_ids == found[place] for place in order)
        return [found[place] for place in sorted(order)]

    alone = [answers([place])[0] for place in range(3)]
    assert answers([0, 1, 2]) == answers([2, 1, 0]) == answers([1, 0, 2]) == alone


def test_placeholders_are_computed_once_for_all_modules_behind_them() -> None:
    llm = tiny_llm(tiny_model(max_positions=512))
    modules = "".join(f'<module name="m{i}">t<param name="x" len="1"/></module>' for i in range(12))
    llm.schemas.add(f'<schema name="s" encode="causal">O{modules}</schema>')
    llm.generate(Prompt('<prompt schema="s">' + "".join(f'<m{i} x="b"/>' for i in range(12)) + " q</prompt>"), greedy(1))
    assert llm.engine.totals.tokens < 1 + 12 * 2 + 12 + 4, (
        "the opening, 12 modules with a placeholder each, and what the prompt says itself"
    )
    left = [stem.segment.tokens for stem in llm.engine.tree.stems()]
    assert (llm.tokenizer.unknown,) not in left, "and they are not kept"


def test_an_exact_prompt_behind_texts_that_are_not_cached_says_so() -> None:
    llm = tiny_llm()
    llm.schemas.add(
        '<schema name="s" encode="causal">Open.<module name="a" cache="false">Aaaa</module><module name="b" cache="false">Bbbb</module>'
        '<module name="c">Cccccc</module></schema>'
    )
    prompt = '<prompt schema="s"><a/><b/><c/> go</prompt>'
    assert llm.schemas.bind(prompt)[1].exact
    for _ in range(2):
        is_plain(llm, prompt, "Open.AaaaBbbbCccccc go")


def test_an_exact_prompt_with_an_argument_that_is_the_placeholder_says_so() -> None:
    llm = tiny_llm()
    llm.schemas.add(
        '<schema name="s" encode="causal">Open.<module name="a" cache="false">Aaaa<param name="x" len="3" default="xyz"/></module>'
        '<module name="c">Cccccc</module></schema>'
    )
    prompt = '<prompt schema="s"><a/><c/> go</prompt>'
    assert llm.schemas.bind(prompt)[1].exact
    is_plain(llm, prompt, "Open.AaaaxyzCccccc go")


@pytest.mark.parametrize("positions", ["rope", "alibi", "learned"])
def test_a_scaffold_of_a_module_and_one_within_it_is_encoded_as_it_is_written(positions: str) -> None:
    llm = tiny_llm(model_of(positions))
    llm.schemas.add(
        '<schema name="s" layout="fixed">Open.<module name="p">A B<module name="c">C D</module>E and F</module>'
        '<scaffold modules="p p/c"/></schema>'
    )
    is_plain(llm, '<prompt schema="s"><p><c/></p> go</prompt>', "Open.A BC DE and F go")


class Dice:
    """A schema, and prompts of it, with and without an opening, holes, modules of one token, params, texts between and scaffolds."""

    def __init__(self, seed: int, *, movable: bool) -> None:
        self.random = random.Random(seed)
        layout = self.random.choice(["fixed", "compact"]) if movable else "fixed"
        names = [f"m{i}" for i in range(self.random.randint(1, 4))]
        self.modules = {name: [f"{name}n"] * self.random.randint(0, 1) for name in names}
        self.params = {name for name in names if self.random.random() < 0.3}
        body = "".join(self._module(name) for name in names)
        paths = [path for name, nested in self.modules.items() for path in (name, *(f"{name}/{one}" for one in nested))]
        joined = self.random.sample(paths, min(len(paths), 2)) if self.random.random() < 0.4 else []
        scaffold = f'<scaffold modules="{" ".join(joined)}"/>' if len(joined) == 2 else ""
        encode = self.random.choice(["opening", "isolated", "causal"])
        opening = self.random.choice(["", "O", "This opens it all."])
        self.schema = f'<schema name="s" layout="{layout}" encode="{encode}">{opening}{body}{scaffold}</schema>'

    def _module(self, name: str) -> str:
        param = '<param name="x" len="3"/>' if name in self.params else ""
        nested = "".join(f'<module name="{one}">within {one}</module>' for one in self.modules[name])
        text, more = self.random.choice(["t", "a text of some length"]), self.random.choice(["", " more"])
        return f'<module name="{name}">{text}{param}{nested}{more}</module>'

    def prompt(self) -> str:
        found = ""
        for name, nested in self.modules.items():
            if self.random.random() < 0.6:
                argument = f' x="{self.random.choice(["", "a", "abc"])}"' if name in self.params else ""
                found += f"<{name}{argument}>{''.join(f'<{one}/>' for one in nested if self.random.random() < 0.7)}</{name}>"
        return f'<prompt schema="s">{found}{self.random.choice(["", " Question?", "?"])}</prompt>'


@pytest.mark.parametrize("positions", ["rope", "alibi", "learned"])
def test_whatever_was_asked_before_random_prompts_are_answered_as_if_it_had_not_been(positions: str) -> None:
    """Prompts of modules, with repair, and the same as plain ones, in one engine; and each in one of its own."""
    model, asked = model_of(positions), 0
    for seed in range(10):
        dice = Dice(seed, movable=positions != "learned")
        llm = tiny_llm(model, max_num_batched_tokens=dice.random.choice([16, 64, 256]))
        llm.schemas.add(dice.schema)
        prompts: list[Prompt | dict[str, list[int]]] = []
        for _ in range(3):
            with suppress(MarkupError):  # an empty one, or text that has no room
                bound = llm.schemas.bind(pml := dice.prompt())[1]
                together = all(run.position == end for run, end in zip(bound.runs, (0, *(run.end for run in bound.runs)), strict=False))
                prompts.append(Prompt(pml, repair=dice.random.choice([None, 0.3, 1.0]) if together else None))
                plain = {"prompt_token_ids": [token for run in bound.runs for token in run.tokens]}
                prompts.append(plain)
                if bound.exact:
                    assert answers_alone(model, dice.schema, Prompt(pml)) == answers_alone(model, dice.schema, plain), (seed, pml)
        dice.random.shuffle(prompts)
        right = [answers_alone(model, dice.schema, prompt) for prompt in prompts]
        for _ in range(2):
            assert [output.outputs[0].token_ids for output in llm.generate(prompts, greedy(3))] == right, (seed, dice.schema, prompts)
        asked += len(prompts)
    assert asked > 30


def answers_alone(model: Model, schema: str, prompt: Prompt | dict[str, list[int]]) -> list[int]:
    llm = tiny_llm(model)
    llm.schemas.add(schema)
    return llm.generate(prompt, greedy(3))[0].outputs[0].token_ids


def test_a_call_of_a_program_is_answered_as_the_prompt_that_it_makes() -> None:
    @program
    def trip(days: Annotated[str, Len(8)]):
        """You plan."""
        f" For {days} days."

    llm = tiny_llm()
    prompt = trip("3").then(" Begin.")
    [answer, other] = llm.generate([prompt, trip("4")], greedy(4))
    assert answer.prompt == prompt.pml and llm.schemas.names() == ["trip"]
    [same] = llm.generate(Prompt(prompt.pml), greedy(4))
    assert same.outputs[0].token_ids == answer.outputs[0].token_ids != other.outputs[0].token_ids
