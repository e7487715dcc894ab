"""Repair: the module tokens that mind their new neighbours most are computed again."""

import pytest
import torch

from pando.engine.engine import Engine
from pando.engine.request import Request, Tenant
from pando.engine.schemas import Prompt
from pando.errors import InvalidOption, InvalidPrompt
from pando.kv.run import Origin, Run
from pando.model.load import Model

from ..tiny import drain, greedy, run, tiny_engine, tiny_llm, tiny_model
from .test_imports import OPENING, answer, ask, module, tokens_of, words

RUNS = [OPENING, module(2, 17, 10), module(3, 13, 27), Run(words(4, 5), 40), module(5, 11, 45)]
WORDS = words(9, 6)
TOKENS = [token for each in RUNS for token in each.tokens] + list(WORDS)
FOREIGN = 13 + 11  # the first module stands where it was encoded


def plain(model: Model, tokens: int = 8) -> list[int]:
    return answer(tiny_engine(model), Request("plain", TOKENS, greedy(tokens)))


def states(engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a row that is at its second token, up to the end of its last module."""
    [row] = engine.answers
    size = engine.pages.page_size
    slots = [page * size + place for page in row.pages for place in range(size)][: RUNS[-1].end]
    return engine.pool.k[:, slots].clone(), engine.pool.v[:, slots].clone()


def halfway(model: Model, request: Request, **options: object) -> Engine:
    """An engine whose row has its first token."""
    engine = tiny_engine(model, max_num_batched_tokens=256, **options)
    engine.add(request)
    while not engine.step():
        pass
    return engine


@pytest.fixture(params=["rope", "alibi", "learned"])
def model(request: pytest.FixtureRequest) -> Model:
    return tiny_model(positions=request.param, layers=4)


@pytest.fixture
def movable() -> Model:
    return tiny_model(layers=4)


def at_home(runs: list[Run]) -> list[Run]:
    """Encoded at the positions where they stand: for a model whose positions are learned."""
    return [Run(each.tokens, each.position, each.origin and Origin(each.origin.context, each.position)) for each in runs]


def runs_for(model: Model) -> list[Run]:
    learned = model.decoder.geometry.freqs is None and model.decoder.geometry.slopes is None
    return at_home(RUNS) if learned else RUNS


@pytest.mark.parametrize("attention", ["auto", "reference"])
def test_a_prompt_repaired_in_full_answers_as_the_plain_prompt_does(model: Model, attention: str) -> None:
    request = ask("x", runs_for(model), WORDS, repair=1.0)
    found = run(tiny_engine(model, attention=attention), [request])["x", 0]
    assert [event.token for event in found] == plain(model)
    assert (found[-1].reuse.modules, found[-1].reuse.repaired) == (0, FOREIGN)
    assert answer(tiny_engine(model), ask("x", runs_for(model), WORDS)) != plain(model), (
        "without repair it is the same, so this shows nothing"
    )


@pytest.mark.usefixtures("all_threads")
def test_compiled_kernels_repair_alike() -> None:
    model = tiny_model(layers=4)
    assert answer(tiny_engine(model), ask("x", RUNS, WORDS, repair=1.0)) == plain(model)
    half = ask("x", RUNS, WORDS, repair=0.5)
    assert answer(tiny_engine(model), half) == answer(tiny_engine(tiny_model(layers=4, native=False)), half)


def test_a_prompt_repaired_in_full_has_the_states_of_the_plain_one(model: Model) -> None:
    ours = states(halfway(model, ask("x", runs_for(model), WORDS, repair=1.0)))
    truth = states(halfway(model, Request("x", TOKENS, greedy(8))))
    for one, other in zip(ours, truth, strict=True):
        torch.testing.assert_close(one, other)


def test_the_more_is_repaired_the_nearer_are_the_states_to_those_of_the_plain_prompt(model: Model) -> None:
    truth = torch.cat(states(halfway(model, Request("x", TOKENS, greedy(8)))))
    distances = []
    for share in (1e-9, 0.2, 0.5, 1.0):
        ours = torch.cat(states(halfway(model, ask("x", runs_for(model), WORDS, repair=share))))
        distances.append(float((ours - truth).square().sum()))
    assert distances == sorted(distances, reverse=True) and distances[-1] < 1e-6 < distances[0]


def test_those_that_deviate_most_are_the_ones_that_are_repaired(movable: Model) -> None:
    """In the layer behind the first their states are then the true ones; those of the others are the copied ones."""
    truth, _ = states(halfway(movable, Request("x", TOKENS, greedy(8))))
    ours, _ = states(halfway(movable, ask("x", RUNS, WORDS, repair=0.25)))
    right = (ours[1] - truth[1]).abs().amax((1, 2)) < 1e-4
    foreign = torch.cat((torch.arange(27, 40), torch.arange(45, 56)))
    assert int(right[foreign].sum()) == FOREIGN // 4
    assert right[:27].all() and right[40:45].all(), "what is new or exact is always right"


def test_the_response_says_what_was_repaired_and_that_the_rest_is_an_approximation(movable: Model) -> None:
    engine = tiny_engine(movable)
    first = run(engine, [ask("first", RUNS, WORDS, repair=0.25)])["first", 0][-1]
    assert (first.reuse.modules, first.reuse.repaired) == (FOREIGN - 6, 6)
    assert first.num_cached_tokens == 0 and first.num_prompt_tokens == len(TOKENS)
    other = run(engine, [ask("other", RUNS, words(30, 4), repair=0.25)])["other", 0][-1]
    assert other.num_cached_tokens >= 56 - 6, "its modules were there"


def test_an_identical_request_finds_what_was_repaired(movable: Model) -> None:
    engine = tiny_engine(movable)
    repairs = []
    engine.repairer.repair = lambda *given, real=engine.repairer.repair: (repairs.append(1), real(*given))  # type: ignore[method-assign]
    first = answer(engine, ask("first", RUNS, WORDS, repair=0.25))
    second = run(engine, [ask("second", RUNS, WORDS, repair=0.25)])["second", 0]
    assert [event.token for event in second] == first and len(repairs) == 1
    assert second[-1].num_cached_tokens == len(TOKENS) - 1
    assert second[-1].reuse.repaired == 6


def test_nothing_approximate_is_found_by_a_plain_prompt_or_by_another_share(movable: Model) -> None:
    engine = tiny_engine(movable)
    answer(engine, ask("x", RUNS, WORDS, repair=0.25))
    found = run(engine, [Request("plain", TOKENS, greedy(8))])["plain", 0]
    assert [event.token for event in found] == plain(movable)
    assert found[-1].num_cached_tokens <= 27, "the opening and what was encoded behind it are exact"
    assert answer(engine, ask("whole", RUNS, WORDS, repair=1.0)) == plain(movable)
    assert answer(engine, ask("not", RUNS, WORDS)) == answer(tiny_engine(movable), ask("not", RUNS, WORDS))


def test_repaired_rows_run_beside_others_and_are_answered_alike(movable: Model) -> None:
    requests = [ask(f"{share}", RUNS, WORDS, repair=share) for share in (0.0, 0.25, 0.5, 1.0)]
    alone = {(r.request_id, 0): answer(tiny_engine(movable), r) for r in requests}
    assert tokens_of(run(tiny_engine(movable), requests)) == alone


def test_several_answers_of_a_repaired_prompt_are_alike(movable: Model) -> None:
    engine = tiny_engine(movable)
    found = tokens_of(run(engine, [Request("n", WORDS, greedy(4, n=3), runs=RUNS, repair=0.5)]))
    assert len(found) == 3 and found["n", 0] == found["n", 1] == found["n", 2]
    assert engine.tree.evictable() == engine.tree.pages, "something is still pinned"
    engine.clear_cache()
    assert engine.pages_in_use == 0


def test_a_repaired_row_that_is_preempted_goes_on_with_the_same_answer(movable: Model) -> None:
    requests = [ask(f"{i}", RUNS, words(40 + i, 6), tokens=40, repair=0.5) for i in range(3)]
    alone = {(r.request_id, 0): answer(tiny_engine(movable), r) for r in requests}
    engine = tiny_engine(movable, kv_cache_tokens=176)
    for request in requests:
        engine.add(request)
    assert tokens_of(drain(engine)) == alone
    assert engine.scheduler.preemptions > 0, "the pool was large enough, so this shows nothing"


def test_a_prompt_in_pml_asks_for_repair(movable: Model) -> None:
    llm = tiny_llm(movable)
    llm.schemas.add('<schema name="s">You read.<module name="a">Apples are red.</module><module name="b">Boats swim.</module></schema>')
    pml = '<prompt schema="s"><a/><b/> What?</prompt>'
    whole, some, none = llm.generate([Prompt(pml, repair=1.0), Prompt(pml, repair=0.5), Prompt(pml)], greedy(6))
    [same] = llm.generate([whole.prompt_token_ids], greedy(6))
    assert whole.outputs[0].token_ids == same.outputs[0].token_ids
    assert [each.reuse.repaired for each in (whole, some, none)] == [11, 6, 0]
    assert [each.reuse.modules for each in (whole, some, none)] == [0, 5, 11]


def test_a_schema_says_what_is_repaired_and_a_prompt_says_otherwise(movable: Model) -> None:
    llm = tiny_llm(movable)
    pml = '<schema name="s">Hello. <module name="a">One two. </module><module name="b">Three.</module></schema>'
    llm.schemas.add(pml, repair=0.5)
    prompt = '<prompt schema="s"><a/><b/> Go.</prompt>'

    def repaired(share: float | None = None) -> int:
        return llm.generate(Prompt(prompt, repair=share), greedy(2))[0].reuse.repaired

    assert [repaired(), repaired(0), repaired(1)] == [3, 0, 6]
    llm.schemas.add(pml)
    assert repaired() == 3, "the same content again changes nothing"
    llm.schemas.add(pml, repair=0)
    assert repaired() == 0
    with pytest.raises(InvalidOption, match=r"repair is 1\.5"):
        llm.schemas.add(pml.replace('"s"', '"t"'), repair=1.5)
    assert llm.schemas.names() == ["s"], "nothing of it is registered"


def test_a_prompt_that_is_exact_needs_no_repair(movable: Model) -> None:
    runs = RUNS[:2]
    found = run(tiny_engine(movable), [ask("x", runs, WORDS, repair=0.5)])["x", 0]
    assert found[-1].reuse.repaired == 0
    assert [event.token for event in found] == answer(tiny_engine(movable), ask("x", runs, WORDS))


def test_a_prompt_with_holes_is_refused_by_name_of_the_hole(movable: Model) -> None:
    engine = tiny_engine(movable)
    with pytest.raises(InvalidPrompt, match="without holes, and the positions from 10 to 19 are empty"):
        engine.add(ask("x", [OPENING, module(3, 13, 20)], WORDS, repair=0.5))
    with pytest.raises(InvalidPrompt, match="from 40 to 49"):
        engine.add(ask("x", RUNS[:3], WORDS, repair=0.5, position=50))
    assert not engine.has_work


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan"), True, "all"])
def test_a_share_that_is_none_is_refused(movable: Model, share: object) -> None:
    with pytest.raises(InvalidOption, match="from 0 to 1"):
        tiny_engine(movable).add(ask("x", RUNS, WORDS, repair=share))


def test_a_model_of_one_layer_needs_no_choice() -> None:
    """Its states depend on tokens and positions alone: all of them are computed, and exact."""
    model = tiny_model(layers=1)
    assert answer(tiny_engine(model), ask("x", RUNS, WORDS, repair=0.1)) == plain(model)


def test_rotated_keys_keep_the_factor_of_their_rotation() -> None:
    """YaRN multiplies what it rotates; a copy is turned further, and not multiplied again."""
    model = tiny_model(layers=3)
    model.decoder.geometry = model.decoder.geometry._replace(factor=1.3)
    alone = [Run(each.tokens, each.position, each.origin and Origin((), 0)) for each in RUNS]
    ours, there = (states(halfway(model, ask("x", runs, WORDS, repair=1e-9)))[0] for runs in (alone, at_home(alone)))
    torch.testing.assert_close(ours, there, atol=1e-4, rtol=1e-3)


def test_repairs_that_a_step_has_no_room_for_come_in_steps_of_their_own(movable: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [ask(name, RUNS, repair=share) for name, share in (("a", 0.5), ("b", 0.49), ("c", 0.48))]
    for budget, together in ((24, 1), (256, 3)):
        engine = tiny_engine(movable, max_num_batched_tokens=budget)
        engine.encode(RUNS[:3], Tenant())
        drain(engine)
        for request in requests:
            engine.add(request)
        assert {row.repair_cost for row in engine.answers} == {25}, "a fifth of 56 tokens, and the rest of 12 repaired and 5 new ones"
        begun: list[int] = []  # the step of each repair
        monkeypatch.setattr(engine.repairer, "repair", lambda *_, engine=engine, begun=begun: begun.append(engine.steps))
        drain(engine)
        assert (len(begun), len(set(begun))) == (3, 3 // together)


def test_a_prompt_that_ends_with_a_repaired_module_is_the_plain_prompt(model: Model) -> None:
    runs = runs_for(model)
    plain = answer(tiny_engine(model), Request("plain", TOKENS[: -len(WORDS)], greedy(8)))
    engine = tiny_engine(model)
    for share, repaired in ((1.0, FOREIGN - 1), (0.5, 12)):
        events = run(engine, [ask(f"{share}", runs, (), repair=share)])[f"{share}", 0]
        assert events[-1].reuse.repaired == repaired, "the last token is computed anyway"
        assert share < 1 or [event.token for event in events] == plain
    assert engine.holds(runs[-1], Tenant())


def test_a_prompt_that_ends_with_a_module_of_one_token_is_repaired() -> None:
    """That token is computed with the row: nothing of the module is copied."""
    for share in (0.01, 0.5, 1.0):
        llm = tiny_llm()
        llm.schemas.add('<schema name="s">Open.<module name="a">Hello</module><module name="b">x</module></schema>')
        output = llm.generate(Prompt('<prompt schema="s"><a/><b/></prompt>', repair=share), greedy(3))[0]
        assert share < 1 or output.outputs[0].token_ids == tiny_llm().generate("Open.Hellox", greedy(3))[0].outputs[0].token_ids
