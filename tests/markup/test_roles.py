"""Roles, compiled to the model's own chat template."""

import pytest

from pando.errors import MarkupError
from pando.markup import tokens
from pando.markup.schema import read_schema

from .toy import SPECIAL, Toy, prompt, schema, shown, spelt, text_of

CHAT = '<schema name="s"><system>Be kind.</system><module name="doc">A document.</module></schema>'


def test_a_conversation_of_roles_reads_as_the_template_writes_it():
    bound = prompt(schema(CHAT), "<user>Hi</user><assistant>Hello</assistant><user>How?</user>")
    assert text_of(bound) == (
        "<start>system:Be kind.<end><start>user:Hi<end><start>assistant:Hello<end><start>user:How?<end><start>assistant:"
    )


def test_the_names_of_special_tokens_mean_those_tokens_only_in_the_template():
    bound = prompt(schema(CHAT), "<user>&lt;end&gt;</user>")
    tokens_of = [token for run in bound.runs for token in run.tokens]
    assert tokens_of.count(SPECIAL["<end>"]) == 2
    assert text_of(bound).count("<end>") == 3


def test_a_template_that_writes_the_system_prompt_into_the_next_message_can_be_cut():
    bound = prompt(schema(CHAT, style="llama", bos=True), "<user>Hi</user><assistant>Yes</assistant><user>So?</user>")
    assert text_of(bound) == "<s>[(SYS Be kind. SYS)Hi] Yes</s><s>[So?]"


def test_what_the_template_starts_with_stands_only_at_the_start():
    default = schema('<schema name="s"><module name="doc">A document.</module></schema>')
    assert text_of(prompt(default, "<user>Hi</user>")).startswith("<start>system:Be good.<end><start>user:Hi")
    assert text_of(prompt(default, "<doc/><user>Hi</user>")) == "A document.<start>user:Hi<end><start>assistant:"


@pytest.mark.parametrize("facts", ["", ' cache="false"', ' encode="isolated"'])
def test_a_module_without_a_name_may_be_the_start(facts):
    known = schema(f'<schema name="s"><module{facts}><user>Hi</user></module><module{facts}><user>You</user></module></schema>', bos=True)
    told = "<s><start>system:Be good.<end><start>user:Hi<end><start>user:You<end><start>assistant:"
    assert text_of(prompt(known)) == told


def test_the_token_that_begins_a_prompt_is_there_once():
    known = schema('<schema name="s"><user>Hi</user><module name="a">A</module></schema>', style="llama", bos=True)
    assert text_of(prompt(known)) == "<s>[Hi]"
    assert spelt(known.stored[0].tokens) == "<s>[Hi]"
    bare = '<schema name="s"><module name="a">A</module></schema>'
    assert text_of(prompt(schema(bare, style="llama", bos=True), "<user>Hi</user>")) == "<s>[Hi]"
    assert text_of(prompt(schema(bare, bos=True), "<user>Hi</user>")).startswith("<s><start>system:Be good.<end><start>user:Hi")


def test_modules_may_hold_turns_of_a_conversation():
    known = schema(
        '<schema name="s"><system>S</system><module name="one"><user>1</user><assistant>I</assistant></module>'
        '<module name="two"><user>2</user><assistant>II</assistant></module></schema>'
    )
    assert text_of(prompt(known, "<two/><user>3</user>")) == (
        "<start>system:S<end><start>user:2<end><start>assistant:II<end><start>user:3<end><start>assistant:"
    )
    assert shown(prompt(known, "<one/><two/>")) == [
        *[("<start>system:S<end>", 0), ("<start>user:1<end><start>assistant:I<end>", 10)],
        ("<start>user:2<end><start>assistant:II<end>", 31),
    ]


def test_modules_may_stand_in_a_role_of_the_schema():
    known = schema('<schema name="s"><user>Read: <module name="a">A</module><module name="b">B</module></user></schema>')
    bound = prompt(known, "<b/>")
    assert text_of(bound) == "<start>system:Be good.<end><start>user:Read: B<end><start>assistant:"
    assert bound.names == ("(opening)", "b", "(schema)", "(prompt)")


def test_imports_may_stand_in_a_role_of_the_prompt():
    assert text_of(prompt(schema(CHAT), "<user><doc/>What is it?</user>")) == (
        "<start>system:Be kind.<end><start>user:A document.What is it?<end><start>assistant:"
    )


def test_roles_do_not_nest():
    known = schema('<schema name="s">O<module name="shot"><user>1</user></module><module name="a">A</module><user>2</user></schema>')
    for inner, message in (
        ("<user><shot/></user>", "<shot> has <user>, and stands in <user> here; move it out, since roles do not nest"),
        ("<user><a/>Q</user>", "the schema has <user>, and stands in <user> here; move it out, since roles do not nest"),
    ):
        with pytest.raises(MarkupError) as caught:
            prompt(known, inner)
        assert caught.value.message == message


def test_a_role_of_the_schema_is_ended_before_one_of_the_prompt_begins():
    known = schema(
        '<schema name="s"><system>Be <union default="a"><module name="a">A</module><module name="b">B</module></union>.</system>'
        '<module name="doc">D</module></schema>'
    )
    turn = "<start>user:DQ<end><start>assistant:"
    assert text_of(prompt(known, "<b/><user><doc/>Q</user>")) == f"<start>system:Be B.<end>{turn}"
    assert text_of(prompt(known, "<user><doc/>Q</user>")) == f"<start>system:Be .<end>{turn}", "a default is for encoding"
    assert text_of(prompt(known, "<b/>!<user><doc/>Q</user>")) == f"<start>system:Be B!.<end>{turn}"
    for inner in ("<user>Q<b/></user>", "<user>Q</user><b/><doc/>"):
        with pytest.raises(MarkupError) as caught:
            prompt(known, inner)
        assert caught.value.message == "<user> would stand inside <system> of the schema; move it out, since roles do not nest"


def test_a_turn_that_the_template_writes_otherwise_behind_others_is_refused_where_it_is_imported():
    turns = "".join(f'<module name="{name}"><user>{name}</user><assistant>!</assistant></module>' for name in "fg")
    known = schema(f'<schema name="s"><system>S</system>{turns}</schema>', style="llama", bos=True)
    assert text_of(prompt(known, "<g/>")) == "<s>[(SYS S SYS)g] !</s>"
    with pytest.raises(MarkupError) as caught:
        prompt(known, "<f/><g/><user>q</user>")
    assert caught.value.message == (
        "<g> has <user>, which the model's chat template writes differently after <system> <user> <assistant> than after <system>, "
        "where it stands in the schema; write that turn in the prompt"
    )
    assert text_of(prompt(known, "<f/><user>q</user>")) == "<s>[(SYS S SYS)f] !</s><s>[q]"


def test_a_role_in_a_module_without_a_name_stands_before_what_follows_it():
    known = schema('<schema name="s"><module cache="false"><system>S</system></module><user>U</user></schema>', style="llama", bos=True)
    assert text_of(prompt(known)) == "<s>[(SYS S SYS)U]"


def test_modules_of_more_turns_than_a_template_is_asked_about_are_answered():
    turns = "".join(f'<module name="t{i}"><user>{i}</user></module>' for i in range(300))
    known = read_schema(f'<schema name="s">O{turns}</schema>', Toy(), movable=True, max_len=10_000)
    bound = prompt(known, "".join(f"<t{i}/>" for i in range(300)))
    assert text_of(bound).endswith("<start>user:299<end><start>assistant:")


def test_the_answer_is_the_assistants_only_behind_a_user():
    assert text_of(prompt(schema(CHAT), "<user>Hi</user> Then")).endswith("<end> Then")
    assert text_of(prompt(schema(CHAT), "<assistant>Hi</assistant>")).endswith("assistant:Hi<end>")


@pytest.mark.parametrize(
    ("style", "inner", "message"),
    [
        (
            "greedy",
            "<user>Hi</user>",
            "the model's chat template cannot be cut around <user> after nothing: it leaves out or repeats the message",
        ),
        (
            "turning",
            "<user>1</user><assistant>2</assistant>",
            "cannot be cut around <assistant> after <user>: what it has written before changes with this message",
        ),
        ("echo", "<user>1</user><assistant>2</assistant>", "cannot be cut around <assistant> after <user>: it repeats an earlier message"),
        (
            "late",
            "<system>1</system><user>2</user><user>3</user>",
            "after <system> <user>: what it has written before changes with this message",
        ),
        ("llama", "<user>1</user><user>2</user>", "<user> after <user>: roles must take turns"),
    ],
)
def test_a_template_that_cannot_be_cut_says_so(style, inner, message):
    with pytest.raises(MarkupError) as caught:
        schema(f'<schema name="s">{inner}</schema>', style=style)
    assert message in caught.value.message
    assert caught.value.column == len('<schema name="s">') + 1 + inner.rindex("<", 0, inner.rindex("</"))
    known = schema('<schema name="s"><module name="a">A</module></schema>', style=style)
    with pytest.raises(MarkupError):
        prompt(known, inner)


def test_a_template_that_cannot_be_cut_before_the_answer_says_so():
    class Moody(Toy):
        def chat(self, messages, *, add_generation_prompt):
            return ("<start>" if add_generation_prompt else "") + super().chat(messages, add_generation_prompt=False)

    known = read_schema('<schema name="s">O</schema>', Moody(), movable=True, max_len=100)
    with pytest.raises(MarkupError, match="cannot be cut around <user> after nothing: what it has written before changes with the answer"):
        prompt(known, "<user>Hi</user>")


def test_a_conversation_of_too_many_roles_is_refused():
    with pytest.raises(MarkupError, match="more than 256 roles in one conversation; join some"):
        schema(f'<schema name="s">{"<user>x</user>" * 300}</schema>')


def test_roles_in_too_many_orders_are_refused(monkeypatch):
    monkeypatch.setattr("pando.markup.reader.KEPT", 10)
    with pytest.raises(MarkupError, match="roles stand in more than 10 different orders; use fewer"):
        schema(f'<schema name="s">{"<user>x</user>" * 12}</schema>')


def test_a_template_is_asked_again_when_too_much_was_remembered(monkeypatch):
    known = schema(CHAT)
    once = text_of(prompt(known, "<user>1</user><assistant>2</assistant>"))
    monkeypatch.setattr(tokens, "KEPT", 1)
    assert text_of(prompt(known, "<user>1</user><assistant>2</assistant><user>3</user>")).startswith(once)
    assert text_of(prompt(known, "<user>1</user><assistant>2</assistant>")) == once
