"""What a schema says, where it stands, and behind what it is encoded: checked by hand, with one token per character."""

import pytest

from pando.errors import MarkupError
from pando.kv.run import context_digest

from .toy import SPECIAL, behind, prompt, schema, shown, spelt, text_of

CITIES = """<schema name="cities" {facts}>
  Plan.
  <module name="trip">For <param name="time" len="4"/> days.</module>
  <union>
    <module name="tokyo">Tokyo</module>
    <module name="rio">Rio</module>
  </union>
  <module name="beach">Beach</module>
</schema>"""


def cities(facts="", **more):
    return schema(CITIES.format(facts=facts), **more)


def states_of(bound):
    """What names the states of each cached run, whatever its position."""
    return [(run.tokens, context_digest(run.origin.context), run.origin.first) for run in bound.runs if run.origin]


# ---- elements


def test_text_outside_any_module_is_always_imported():
    known = schema('<schema name="s">Open <module name="a">A</module> middle <module name="b">B</module> end</schema>')
    assert text_of(prompt(known)) == "Open  middle  end"
    assert text_of(prompt(known, "<b/>")) == "Open  middle B end"
    assert text_of(prompt(known, "<a/><b/>")) == "Open A middle B end"


def test_a_module_without_a_name_is_always_imported():
    known = schema('<schema name="s"><module name="a">A</module><module>B<module name="c">C</module></module></schema>')
    assert text_of(prompt(known)) == "B"
    assert text_of(prompt(known, "<a/><c/>")) == "ABC"


def test_names_may_have_dots_so_that_files_name_modules():
    known = schema('<schema name="s"><module name="unit.py">pass</module></schema>')
    assert text_of(prompt(known, "<unit.py/>")) == "pass"


def test_nested_modules_are_imported_inside_their_parent():
    known = schema(
        """<schema name="s">
          <module name="travel-plan">Plan for <param name="for" length="6"/>: <union scaffold="home">
            <module name="overseas">abroad, <union><module name="tokyo">Tokyo</module><module name="rio">Rio</module></union>!</module>
            <module name="home">here</module>
          </union> End.</module>
        </schema>"""
    )
    bound = prompt(known, '<travel-plan for="a week"><overseas><tokyo/></overseas></travel-plan>')
    assert text_of(bound) == "Plan for a week: abroad, Tokyo! End."
    assert bound.imported == ("travel-plan", "travel-plan/overseas", "travel-plan/overseas/tokyo")
    assert text_of(prompt(known, '<travel-plan for="3"/>')) == "Plan for 3:  End."


def test_parameter_length_and_scaffold_are_other_spellings():
    union = '<union default="u"><module name="u">U</module></union>'
    a = f'<schema name="s"><module name="m"><param name="x" len="3" default="d"/>{union}</module></schema>'
    b = a.replace("<param", "<parameter").replace("len=", "length=").replace("default=", "scaffold=")
    assert [(run.tokens, behind(run)) for run in schema(a).stored] == [(run.tokens, behind(run)) for run in schema(b).stored]


def test_an_argument_takes_the_place_of_its_param_and_a_default_stands_in_for_a_missing_one():
    known = schema('<schema name="s"><module name="m">a<param name="x" len="5" default="dd"/>b</module></schema>')
    assert shown(prompt(known, '<m x="123"/>')) == [("a", 0), ("{123}", 1), ("b", 4)]
    assert shown(prompt(known, "<m/>")) == [("a", 0), ("{dd}", 1), ("b", 3)]
    assert shown(prompt(known, '<m x=""/>')) == [("a", 0), ("b", 1)]


def test_params_may_stand_in_a_role_of_their_module():
    known = schema('<schema name="s"><module name="m"><user>Hi <param name="x" len="5"/></user></module></schema>')
    assert text_of(prompt(known, '<m x="Bo"/>')) == "<start>user:Hi Bo<end><start>assistant:"


def test_cache_false_is_computed_with_the_request():
    known = schema(
        '<schema name="s">O<module name="a" cache="false">A<module name="n">N</module></module><module name="b">B</module></schema>'
    )
    bound = prompt(known, "<a><n/></a><b/>")
    assert shown(bound) == [("O", 0), ("{AN}", 1), ("B", 3)], "what is nested in it, too"
    assert bound.names == ("(opening)", "a + a/n", "b")
    assert (bound.module_tokens, bound.new_tokens) == (2, 2)
    assert [spelt(run.tokens) for run in known.stored] == ["O", "B"]
    assert [(part.path, part.cached, part.tokens, len(part.runs)) for part in known.modules] == [
        *[("(opening)", True, 1, 1), ("a", False, 1, 0), ("a/n", False, 1, 0), ("b", True, 1, 1)],
    ]


def test_src_is_read_below_the_directory_as_it_is(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "unit.py").write_text("\n  def f(): <b>&amp;\n")
    pml = '<schema name="s"><module name="unit.py" src="code/unit.py"/></schema>'
    assert text_of(prompt(schema(pml, directory=tmp_path), "<unit.py/>")) == "\n  def f(): <b>&amp;\n"


def test_the_content_names_a_schema_and_comments_are_no_content(tmp_path):
    (tmp_path / "a").write_text("one")
    pml = '<schema name="s">O<module name="a" src="a"/><scaffold modules="a b"/><module name="b" encode="causal">x</module></schema>'
    known = schema(pml, directory=tmp_path).digest
    assert (
        schema(pml.replace("O<", "O<!-- c --><").replace('name="b" encode="causal"', 'encode="causal" name="b"'), directory=tmp_path).digest
        == known
    )
    for changed in (pml.replace("O", "P"), pml.replace(' encode="causal"', ""), pml.replace('<scaffold modules="a b"/>', "")):
        assert schema(changed, directory=tmp_path).digest != known
    (tmp_path / "a").write_text("two")
    assert schema(pml, directory=tmp_path).digest != known


# ---- positions


def test_fixed_a_module_starts_after_everything_before_it_imported_or_not():
    known = cities('layout="fixed"')
    assert shown(prompt(known, "<beach/>")) == [("Plan.", 0), ("Beach", 24)]  # 5 + 4 + 4 + 6, and a union of 5


def test_fixed_a_union_is_as_long_as_its_longest_member_and_members_share_their_start():
    known = cities('layout="fixed"')
    assert shown(prompt(known, "<tokyo/><beach/>"))[1:] == [("Tokyo", 19), ("Beach", 24)]
    assert shown(prompt(known, "<rio/><beach/>"))[1:] == [("Rio", 19), ("Beach", 24)]


def test_fixed_a_param_reserves_its_length():
    known = cities('layout="fixed"')
    assert shown(prompt(known, '<trip time="3"/>'))[1:] == [("For ", 5), ("{3}", 9), (" days.", 13)]


def test_fixed_text_between_two_imports_goes_into_the_hole_behind_the_first():
    known = cities('layout="fixed"')
    assert shown(prompt(known, '<trip time="3"/>12345<beach/>'))[3:] == [(" days.", 13), ("{12345}", 19), ("Beach", 24)]
    assert shown(prompt(known, "<rio/>!!<beach/>"))[1:] == [("Rio", 19), ("{!!}", 22), ("Beach", 24)]
    assert shown(prompt(known, "Hi<tokyo/>"))[:2] == [("Plan.", 0), ("{Hi}", 5)], "before the first import: behind the opening"


def test_fixed_text_that_does_not_fit_is_an_error():
    with pytest.raises(MarkupError, match="3 tokens of text between two imports, and the hole there has room for 2; shorten it") as caught:
        prompt(cities('layout="fixed"'), "<rio/>!!!<beach/>")
    assert (caught.value.line, caught.value.column) == (1, 31)


def test_fixed_a_space_between_two_imports_without_a_hole_is_no_text():
    assert shown(prompt(cities('layout="fixed"'), "<tokyo/> <beach/>"))[1:] == [("Tokyo", 19), ("Beach", 24)]


def test_fixed_spaces_that_fit_are_text():
    assert shown(prompt(cities('layout="fixed"'), "<rio/>  <beach/>"))[1:] == [("Rio", 19), ("{  }", 22), ("Beach", 24)]


def test_fixed_text_at_the_end_starts_after_the_schemas_end():
    assert shown(prompt(cities('layout="fixed"'), "<rio/> Go."))[2:] == [("{ Go.}", 29)]


def test_fixed_text_inside_an_import_stands_behind_the_module():
    known = schema(
        '<schema name="s" layout="fixed"><module name="p">P<module name="n">NN</module>Q</module><module name="z">Z</module></schema>'
    )
    with pytest.raises(MarkupError, match="room for 0"):
        prompt(known, "<p>x<n/></p>")
    assert shown(prompt(known, "<p>x</p>")) == [("P", 0), ("Q", 3), ("{x}", 4)]


def test_compact_leaves_no_holes():
    known = cities()
    assert known.layout == "compact"
    assert shown(prompt(known, '<trip time="3"/> x <rio/><beach/> Go.')) == [
        *[("Plan.", 0), ("For ", 5), ("{3}", 9), (" days.", 10), ("{ x }", 16)],
        *[("Rio", 19), ("Beach", 22), ("{ Go.}", 27)],
    ]


def test_compact_text_inside_an_import_stands_where_it_is_written():
    known = schema('<schema name="s"><module name="p">P<module name="n">N</module>Q<module name="m">M</module>R</module></schema>')
    assert text_of(prompt(known, "<p>1<n/>2<m/>3</p>4")) == "P1N2QMR34"


def test_compact_is_refused_on_a_model_whose_positions_cannot_move_and_the_default_is_fixed():
    assert cities(movable=False).layout == "fixed"
    with pytest.raises(MarkupError, match='layout="compact" on a model whose positions cannot move; use layout="fixed", or leave it out'):
        cities('layout="compact"', movable=False)


def test_where_positions_cannot_move_no_run_is_shifted():
    for encode in ("opening", "isolated", "causal"):
        for bos in (False, True):
            known = schema(CITIES.format(facts=f'encode="{encode}"'), movable=False, bos=bos)
            assert {run.shift for run in prompt(known, '<trip time="3"/><rio/><beach/> x').runs} == {0}


def test_order_free_lets_a_prompt_import_modules_in_any_order():
    known = schema(
        '<schema name="s" order="free">O<module name="a">A</module><module name="b">B</module><module name="c">C</module></schema>'
    )
    assert text_of(prompt(known, "<c/>, <a/>?")) == "OC, A?"
    assert text_of(prompt(known, "<user><b/><a/>Q</user>")) == "O<start>user:BAQ<end><start>assistant:"
    assert states_of(prompt(known, "<c/><a/>"))[1:] == states_of(prompt(known, "<a/><c/>"))[:0:-1]


# ---- states


def test_opening_a_module_sees_the_opening_text_and_itself_and_no_other_module():
    plan, words, days, tokyo, rio, beach = cities().stored
    assert behind(plan) == [("", 0)]
    assert behind(words) == behind(tokyo) == behind(rio) == behind(beach) == [("Plan.", 0), ("", 5)]
    assert behind(days) == [("Plan.", 0), ("For ", 5), ("<unk>" * 4, 9), ("", 13)]


def test_the_opening_is_the_beginning_of_a_plain_prompt():
    known = schema('<schema name="s">Open.<module name="a">A</module></schema>', bos=True)
    opening = known.stored[0]
    assert (spelt(opening.tokens), opening.position, opening.origin.context, opening.origin.first) == ("<s>Open.", 0, (), 0)
    assert behind(known.stored[1]) == [("<s>Open.", 0), ("", 6)]


def test_without_an_opening_a_prompt_begins_as_every_prompt_does():
    known = schema('<schema name="s"><module name="a">A</module></schema>', bos=True)
    assert shown(prompt(known, "<a/>x")) == [("<s>", 0), ("A", 1), ("{x}", 2)]
    assert behind(known.stored[1]) == [("<s>", 0), ("", 1)]
    bare = schema('<schema name="s"><module name="a">A</module></schema>')
    assert shown(prompt(bare, "<a/>x")) == [("A", 0), ("{x}", 1)]
    assert behind(bare.stored[0]) == [("", 0)]


def test_isolated_a_module_sees_only_itself_behind_a_bos_whose_states_are_dropped():
    known = schema('<schema name="s" encode="isolated">O<module name="a">A</module></schema>', bos=True)
    a = known.stored[1]
    assert behind(a) == [("<s>", 0), ("", 1)]
    assert a.origin.context[0].origin is None
    assert shown(prompt(known, "<a/>")) == [("<s>O", 0), ("A", 2)]
    assert behind(schema('<schema name="s" encode="isolated">O<module name="a">A</module></schema>').stored[1]) == [("", 0)]


def test_isolated_the_same_text_in_two_schemas_is_one_segment():
    one = schema('<schema name="s" encode="isolated">Open<module name="a">Text</module></schema>', bos=True)
    two = schema(
        '<schema name="t" encode="isolated" layout="fixed">Other<module name="x">X</module><module name="b">Text</module></schema>',
        bos=True,
    )
    assert states_of(prompt(one, "<a/>"))[1] == states_of(prompt(two, "<b/>"))[1]


def test_causal_a_module_sees_everything_before_it_in_the_schema():
    *_, beach = cities('encode="causal"').stored
    assert behind(beach) == [("Plan.", 0), ("For ", 5), ("<unk>" * 4, 9), (" days.", 13), ("", 19)], "a union without a default is left out"


def test_causal_a_union_in_between_is_represented_by_its_default():
    pml = CITIES.format(facts='encode="causal" layout="fixed"').replace("<union>", '<union default="rio">')
    tokyo, rio, beach = schema(pml).stored[-3:]
    assert behind(beach)[-2:] == [("Rio", 19), ("", 24)]
    assert behind(tokyo) == behind(rio) and behind(rio)[-1] == ("", 19)


def test_encode_may_differ_by_module_and_is_inherited_by_what_is_nested():
    known = schema(
        '<schema name="s">O<module name="a">A</module><module name="b" encode="causal">B<module name="n">N</module></module>'
        '<module name="c" encode="isolated">C</module></schema>'
    )
    _, _, b, n, c = known.stored
    assert behind(b) == [("O", 0), ("A", 1), ("", 2)]
    assert behind(n) == [("O", 0), ("A", 1), ("B", 2), ("", 3)]
    assert behind(c) == [("", 0)]
    assert [(part.path, part.encode, part.tokens) for part in known.modules] == [
        *[("(opening)", "opening", 1), ("a", "opening", 1), ("b", "causal", 1)],
        *[("b/n", "causal", 1), ("c", "isolated", 1)],
    ]


def test_a_module_does_not_see_what_is_nested_in_it_nor_what_it_is_nested_in():
    known = schema('<schema name="s">O<module name="p">P<module name="n">N</module>Q</module></schema>')
    _, p, n, q = known.stored
    assert behind(n) == behind(p) == [("O", 0), ("", 1)]
    assert behind(q) == [("O", 0), ("P", 1), ("", 2)]
    assert shown(prompt(known, "<p><n/></p>")) == [("O", 0), ("P", 1), ("N", 2), ("Q", 3)]


def test_a_parameter_is_encoded_as_its_default_then_unknown_tokens_and_never_stored():
    known = schema('<schema name="s"><module name="m">a<param name="x" len="4" default="hi"/>b</module></schema>')
    assert behind(known.stored[1]) == [("a", 0), ("hi<unk><unk>", 1), ("", 5)]
    placeholder = known.stored[1].origin.context[1]
    assert placeholder.origin is None
    assert placeholder not in known.stored
    assert [spelt(run.tokens) for run in known.stored] == ["a", "b"]


def test_what_is_stored_comes_behind_all_that_it_is_encoded_behind():
    pml = CITIES.format(facts='encode="causal"').replace("</schema>", '<scaffold modules="trip beach"/></schema>')
    for known in (cities(), schema(pml), schema(pml.replace("causal", "opening"))):
        made = set()
        for run in known.stored:
            for one in run.origin.context:
                assert one.origin is None or (one.tokens, one.origin) in made
            made.add((run.tokens, run.origin))


def test_two_prompts_that_import_the_same_module_get_the_same_states_wherever_it_stands():
    known = cities()
    one, two = prompt(known, "<beach/>"), prompt(known, '<trip time="3"/>some words<tokyo/><beach/>')
    assert states_of(one)[-1] == states_of(two)[-1]
    assert one.runs[-1].position != two.runs[-1].position
    again = cities('layout="fixed"')
    assert states_of(prompt(again, "<beach/>")) == states_of(one), "and in whatever schema, behind the same opening"


def test_a_changed_module_changes_only_itself():
    before, after = cities(), schema(CITIES.format(facts="").replace("Tokyo", "Osaka!"))
    kept = {(run.tokens, context_digest(run.origin.context)) for run in before.stored}
    changed = [spelt(run.tokens) for run in after.stored if (run.tokens, context_digest(run.origin.context)) not in kept]
    assert changed == ["Osaka!"]


def test_text_in_a_module_is_that_modules_however_it_is_encoded():
    known = schema(
        '<schema name="s">O<module name="a">A<module encode="isolated">B</module></module><module encode="isolated">C</module></schema>'
    )
    assert prompt(known, "<a/>").names == ("(opening)", "a", "a", "(schema)")
    assert [(part.path, part.encode) for part in known.modules] == [
        ("(opening)", "opening"), ("a", "opening"), ("a", "isolated"), ("(schema)", "isolated"),
    ]  # fmt: skip


# ---- scaffolds

SCAFFOLD = """<schema name="s">O
  <module name="a">A</module>
  <module name="b">B<param name="x" len="2"/>b</module>
  <module name="c">C</module>
  <scaffold modules="c a b"/>
</schema>"""


def test_a_scaffold_is_also_encoded_together_and_overrides_when_a_prompt_imports_all_of_it():
    known = schema(SCAFFOLD)
    some, all_of_it = prompt(known, '<a/><b x="1"/>'), prompt(known, '<a/><b x="1"/><c/>')
    assert behind(some.runs[2]) == [("O", 0), ("", 1)]
    assert behind(all_of_it.runs[2]) == [("O", 0), ("A", 1), ("", 2)]
    assert behind(all_of_it.runs[-1]) == [("O", 0), ("A", 1), ("B", 2), ("<unk><unk>", 3), ("b", 5), ("", 6)]
    assert shown(all_of_it) == [("O", 0), ("A", 1), ("B", 2), ("{1}", 3), ("b", 4), ("C", 5)]


def test_a_scaffold_does_not_make_an_exact_prompt_an_approximation():
    known = schema(
        '<schema name="s" encode="causal">O<module name="a">A</module><module name="b">B</module><module name="c">C</module>'
        '<scaffold modules="b c"/></schema>'
    )
    assert prompt(known, "<a/><b/><c/>").exact
    assert prompt(known, "<b/><c/>").exact, "they were encoded together behind the opening, as they stand here"
    assert not prompt(known, "<c/>").exact


def test_a_scaffold_says_how_much_more_it_stores():
    [scaffold] = schema(SCAFFOLD).scaffolds
    assert scaffold.paths == ("a", "b", "c")
    assert scaffold.tokens == 3, "the first module sees what it sees anyway"
    assert [spelt(run.tokens) for run in scaffold.runs] == ["B", "b", "C"]
    assert len(schema(SCAFFOLD).stored) == 5 + 3


def test_what_stands_behind_a_param_of_the_first_module_is_not_stored_again():
    known = schema(
        '<schema name="s">O<module name="a">A<param name="x" len="2"/>a</module><module name="b">B</module>'
        '<scaffold modules="a b"/></schema>'
    )
    [scaffold] = known.scaffolds
    assert ([spelt(run.tokens) for run in scaffold.runs], scaffold.tokens) == (["B"], 1)
    assert len(known.stored) == 5


def test_an_isolated_scaffold_sees_no_opening():
    known = schema(SCAFFOLD.replace('name="s"', 'name="s" encode="isolated"'), bos=True)
    assert behind(prompt(known, '<a/><b x="1"/><c/>').runs[2]) == [("<s>", 0), ("A", 1), ("", 2)]


# ---- exact


def test_the_opening_plus_a_causal_chain_is_exact():
    pml = '<schema name="s" encode="causal"{}>O<module name="a">A</module>-<module name="b">B</module></schema>'
    for facts in ("", ' layout="fixed"'):
        known = schema(pml.format(facts))
        assert prompt(known, "<a/><b/> more").exact
        assert prompt(known, "<a/>").exact
        assert not prompt(known, "<b/>").exact, "b has seen a"
    assert not prompt(schema(pml.format("")), "<a/>x<b/>").exact


def test_the_opening_alone_or_with_one_module_right_behind_it_is_exact():
    known = cities()
    assert prompt(known, "Hello").exact
    assert prompt(known, "<beach/> Hello").exact
    assert not prompt(known, "<rio/><beach/>").exact
    assert not prompt(known, "Hello <beach/>").exact
    assert not prompt(cities('layout="fixed"'), "<beach/>").exact, "there is a hole"


def test_a_chain_with_an_argument_is_exact_only_up_to_it():
    known = schema(
        '<schema name="s">O<module name="a">A<param name="x" len="2"/></module>'
        '<module name="b">A<param name="x" len="2"/>B</module></schema>'
    )
    assert prompt(known, '<a x="12"/>').exact
    assert not prompt(known, '<b x="12"/>').exact, "B has seen a placeholder"


def test_an_argument_that_is_the_whole_placeholder_is_what_was_seen():
    known = schema('<schema name="s">O<module name="a">A<param name="x" len="2" default="12"/>B</module></schema>')
    assert prompt(known, "<a/>").exact and prompt(known, '<a x="12"/>').exact
    assert not prompt(known, '<a x="1"/>').exact and not prompt(known, '<a x="21"/>').exact


def test_a_module_that_stood_in_many_places_is_still_exact_where_it_is():
    fillers = "".join(f'<module name="f{length}">{"x" * length}</module>' for length in range(1, 7))
    known = schema(f'<schema name="s">O{fillers}<module name="m">A<module name="n">N</module>B</module></schema>')
    assert prompt(known, "<m/>").exact
    assert not any(prompt(known, f"<f{length}/><m/>").exact for length in range(1, 7))
    assert prompt(known, "<m/>").exact


def test_isolated_modules_are_not_exact():
    known = schema('<schema name="s" encode="isolated">O<module name="a">A</module></schema>', bos=True)
    assert not prompt(known, "<a/>").exact
    assert prompt(known, "x").exact


# ---- bound prompts


def test_new_runs_that_touch_are_one():
    known = schema('<schema name="s"><module name="m">a<param name="x" len="5"/><param name="y" len="5"/></module></schema>')
    bound = prompt(known, '<m x="1" y="2"/> and more')
    assert shown(bound) == [("a", 0), ("{12 and more}", 1)]
    assert bound.names == ("m", "m:x + m:y + (prompt)")
    assert (bound.module_tokens, bound.new_tokens, bound.end) == (1, 11, 12)


def test_a_modules_own_text_stays_its_own_run():
    known = schema('<schema name="s"><module name="a">A</module><module name="b">B</module></schema>')
    assert shown(prompt(known, "<a/><b/>")) == [("A", 0), ("B", 1)]


def test_contexts_share_their_runs():
    known = schema('<schema name="s" encode="causal">O' + "".join(f'<module name="m{i}">{i}</module>' for i in range(50)) + "</schema>")
    *_, before, last = known.stored
    assert last.origin.context[:-1] == before.origin.context
    assert last.origin.context[-1] is before


def test_special_tokens_in_text_are_only_text():
    known = schema('<schema name="s">O<module name="m">&lt;end&gt;<param name="x" len="9"/></module></schema>')
    tokens = {token for run in prompt(known, '<m x="&lt;s&gt;"/>&lt;/s&gt;').runs for token in run.tokens}
    assert not tokens & set(SPECIAL.values())
