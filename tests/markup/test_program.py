"""Python functions as schemas, and calls of them as prompts.

Their first string is text, not a docstring, whatever a formatter makes of it.
"""

# ruff: noqa: B021

import re
import runpy
import time
from typing import Annotated

import pytest

from pando.errors import InvalidPrompt, MarkupError
from pando.markup.binding import bind
from pando.markup.program import Len, program

from .toy import schema, shown, text_of

CITIES = ("Rome", "Oslo")


def said(prompt):
    return text_of(bind(schema(prompt.schema), prompt.pml))


def test_a_decorated_function_becomes_a_schema_and_calling_it_makes_a_prompt():
    @program
    def greeting():
        "Hello,"
        " world & <all>."

    assert greeting.pml == '<schema name="greeting" xml:space="preserve">Hello, world &amp; &lt;all&gt;.</schema>'
    assert said(greeting()) == "Hello, world & <all>."


def test_a_string_in_triple_quotes_is_text_without_its_indentation():
    @program
    def code():
        """
        def f():
            return 1
        """
        "\n  kept  \n"

    assert said(code()) == "def f():\n    return 1\n  kept  \n"


def test_lines_that_begin_or_end_in_braces_stay_lines():
    @program
    def card(x: Annotated[str, Len(4)], y: Annotated[str, Len(4)]):
        f"""
        Name: {x}
          City: {y}
        {x}
        Go.
        """

    assert said(card("Bob", "Rome")) == "Name: Bob\n  City: Rome\nBob\nGo."


def test_a_case_may_be_a_negative_number():
    @program
    def near(n: int):
        "Near"
        match n:
            case -1:
                " before"
            case -2.5 | 3:
                " further"

    assert [said(near(n)) for n in (-1, -2.5, 3, 1)] == ["Near before", "Near further", "Near further", "Near"]


@pytest.mark.parametrize("length", [0, -1, "many", 2.5, True])
def test_a_length_that_is_none_is_named_at_the_function(length):
    with pytest.raises(MarkupError, match=r"the length of 'x' is .*; it is a number of tokens, from 1 on") as caught:

        @program
        def echo(x: Annotated[str, Len(length)]):
            f"Say {x}."

    assert caught.value.file == __file__


@pytest.mark.parametrize("facts", [{"encode": "nonsense"}, {"layout": "loose"}])
def test_what_a_schema_does_not_know_is_named_at_the_function(facts):
    with pytest.raises(MarkupError, match=r"(encode is 'nonsense'|layout is 'loose'); it is one of "):

        @program(**facts)
        def echo():
            "Say."


def test_a_case_of_true_is_not_for_one():
    @program
    def light(on: object):
        match on:
            case True:
                "bright"
            case 1:
                "one"
            case None:
                "none"

    assert [said(light(on)) for on in (True, 1, 1.0, None)] == ["bright", "one", "one", "none"]


def test_characters_that_xml_cannot_hold_are_named():
    @program
    def echo(x: Annotated[str, Len(9)]):
        f"Say {x}."

    with pytest.raises(MarkupError, match=r"the argument 'x' of echo\(\) has the character U\+000C, which PML cannot hold; remove it"):
        echo("a\fb")
    with pytest.raises(InvalidPrompt, match=r"the text after a prompt has the character U\+0000"):
        echo("a").then("\0")


def test_an_annotated_argument_in_braces_is_a_param():
    @program
    def trip(days: Annotated[str, Len(4)], mood: Annotated[str, Len(9)] = "happy"):
        "You plan."
        f" For {days} {mood} days, {days}!"

    bound = bind(schema(trip.pml), trip("3").pml)
    assert shown(bound) == [
        *[("You plan.", 0), (" For ", 9), ("{3}", 14), (" ", 15), ("{happy}", 16)],
        *[(" days, ", 21), ("{3}", 28), ("!", 29)],
    ]
    assert '<param name="mood" len="9" default="happy"/>' in trip.pml
    with pytest.raises(MarkupError, match=r"the argument 'days' of <text.1> has 5 tokens, and 4 are allowed"):
        said(trip("12345"))


def test_if_is_a_module():
    @program
    def trip(beach: bool, nights: int):
        "Plan."
        if beach:
            " Swim."
        if nights > 3 and not beach:
            " Rest."

    assert '<module name="beach"> Swim.</module><module name="if"> Rest.</module>' in trip.pml
    assert [said(trip(beach, nights)) for beach, nights in ((True, 5), (False, 5), (False, 1))] == [
        "Plan. Swim.",
        "Plan. Rest.",
        "Plan.",
    ]


def test_if_else_is_a_union():
    @program
    def size(n: int):
        if n < 1:
            "none"
        elif n == 1:
            "one"
        else:
            "many"

    assert size.pml.count("<union>") == 1 and size.pml.count("<module") == 3
    assert [said(size(n)) for n in (0, 1, 2)] == ["none", "one", "many"]


def test_match_is_a_union():
    @program
    def city(name: str):
        "In:"
        match name:
            case "tokyo":
                "Tokyo"
            case "rio" | "lima":
                "the south"
            case 3:
                "three"
            case _:
                "nowhere"

    assert re.findall('module name="(.*?)"', city.pml) == ["tokyo", "rio", "case", "other"]
    assert [said(city(name)) for name in ("tokyo", "lima", 3, "x")] == ["In:Tokyo", "In:the south", "In:three", "In:nowhere"]


@program
def tool(name: Annotated[str, Len(8)], loud: bool = False):
    f" Use a {name}"
    if loud:
        "!"
    "."


def test_a_call_of_another_decorated_function_is_a_nested_module():
    @program
    def work(thing: Annotated[str, Len(8)], loud: bool):
        "Work."
        tool("saw")
        tool(f"{thing}s", loud=loud)
        if loud:
            tool(thing)

    assert re.findall('module name="(.*?)"', work.pml) == ["tool", "loud", "tool.2", "loud", "loud", "tool", "loud"]
    assert said(work("axe", True)) == "Work. Use a saw. Use a axes!. Use a axe."
    assert said(work("axe", False)) == "Work. Use a saw. Use a axes."


def test_a_loop_over_constants_unrolls():
    @program
    def cities(warm: bool):
        for city in CITIES:
            f"{city} "
            if city == "Rome":
                "(south) "
            if warm:
                f"{city} is warm. "
        for i in range(2):
            f"{i}"

    assert re.findall('module name="(.*?)"', cities.pml) == ["warm", "warm.2"]
    assert said(cities(False)) == "Rome (south) Oslo 01"
    assert said(cities(True)) == "Rome (south) Rome is warm. Oslo Oslo is warm. 01"


def test_a_long_loop_in_a_long_file_unrolls_in_a_moment(tmp_path):
    file = tmp_path / "long.py"
    lines = ["from pando.markup.program import program", *(f"LINE_{i} = 'as in any file'" for i in range(1000)), "@program", "def table():"]
    file.write_text("\n".join([*lines, "    for i in range(2000):", "        f'row {i}, '"]) + "\n")
    start = time.thread_time()
    table = runpy.run_path(str(file))["table"]
    assert time.thread_time() - start < 3
    assert table.pml.endswith("row 1998, row 1999, </schema>")


def test_texts_of_a_long_loop_are_named_in_a_moment():
    start = time.thread_time()

    @program
    def table(x: Annotated[str, Len(3)]):
        for i in range(6000):
            f"row {i} of {x}, "

    assert time.thread_time() - start < 5
    assert table.pml.count("<module ") == 6000 and '<module name="text.6000">row 5999 of <param name="x" ' in table.pml


def test_its_content_not_the_process_decides_whether_it_is_the_same_schema():
    def make(text):
        def same():
            f"{text}"

        return program(same)

    assert schema(make("a").pml).digest == schema(make("a").pml).digest != schema(make("b").pml).digest


def test_a_program_may_choose_how_it_is_encoded():
    @program(encode="causal", layout="fixed")
    def careful(x: bool):
        "Open"
        if x:
            "X"

    known = schema(careful.pml)
    assert (known.encode, known.layout) == ("causal", "fixed")


def test_new_text_may_follow():
    @program
    def greeting():
        "Hello"

    assert said(greeting().then(", you & <me>.\n").then(" Bye")) == "Hello, you & <me>.\n Bye"


def test_values_and_names_that_xml_would_read_otherwise_stay_what_they_are():
    @program
    def quote(module: bool, text: Annotated[str, Len(40)]):
        if module:
            f"[{text}]"

    assert said(quote(True, "a \"b\" <c> & 'd'\n\te")) == "[a \"b\" <c> & 'd'\n\te]"


def refusal(function):
    with pytest.raises(MarkupError) as caught:
        program(function)
    return caught.value


def test_what_cannot_be_compiled_is_an_error_at_the_line_of_the_function():
    def assigns():
        "text"
        x = 1  # noqa: F841

    error = refusal(assigns)
    assert error.message.startswith("Assign cannot be compiled; a program is made of a string, if, match,")
    assert error.file == __file__
    assert error.line == assigns.__code__.co_firstlineno + 2
    assert error.shown().splitlines()[1:] == ["            x = 1  # noqa: F841", "            ^"]


def unannotated(x: str):
    f"{x}"


def formatted(x: Annotated[str, Len(3)]):
    f"{x:>10}"


def unknown_name():
    f"{undefined_name}"  # noqa: F821


def number():
    3  # noqa: B018


def calls_the_world(x: str):
    if x.startswith("a"):
        "a"


def calls_no_program():
    print("x")


def loops_over_arguments(xs: list):
    for x in xs:
        f"{x}"


def loops_over_pairs():
    for a, b in ((1, 2),):
        f"{a}{b}"


def loops_over_its_argument(x: Annotated[str, Len(3)]):
    for x in ("a", "b"):
        f"{x}"
    f"{x}"


def loops_over_its_loop():
    for x in (1, 2):
        for x in (3, 4):
            f"{x}"
        f"{x}"


def loops_for_long():
    for i in range(1_000_000_000):
        f"{i}"


def guards(x: str):
    match x:
        case "a" if x:
            "a"


def captures(x: str):
    match x:
        case [y]:
            f"{y}"


def controls():
    "\x01"


def misses_an_argument():
    tool()


def spreads(xs: list):
    tool(*xs)


def awaits(x: bool):
    while x:
        "x"


def returns():
    return "x"


def compares_badly():
    for x in ("é", 1):
        if x < 2:
            "x"


def annotates_a_stranger(x: "Strange"):  # noqa: F821
    "x"


def annotates_what_is_not_there(x: "re.Strange"):
    "x"


def annotates_half(x: "Annotated[str, Len(3)"):  # noqa: F722
    "x"


def user():
    "x"


@pytest.mark.parametrize(
    ("function", "line", "message"),
    [
        (unannotated, 1, r"'x' has no length; annotate it: x: Annotated\[str, Len\(10\)\]"),
        (formatted, 1, "a conversion or format in braces; braces hold only a name"),
        (unknown_name, 1, "'undefined_name' is neither an argument nor a constant"),
        (number, 1, "a value that is not a string; write text in quotes"),
        (calls_the_world, 1, r"cannot be compiled; use arguments, constants, comparisons, and, or, not"),
        (calls_no_program, 1, "'print' is not a known program; call only functions that were decorated before"),
        (loops_over_arguments, 1, "'xs' is neither an argument nor a constant|'xs'"),
        (loops_over_pairs, 1, "a loop over more than one variable; use one"),
        (loops_over_its_argument, 1, "the variable of a loop is 'x', which has a meaning already; rename it"),
        (loops_over_its_loop, 2, "the variable of a loop is 'x', which has a meaning already; rename it"),
        (loops_for_long, 1, "a loop of 1,000,000,000 rounds; at most 10,000 are unrolled"),
        (guards, 2, "a case with a guard cannot be compiled; use if"),
        (captures, 2, "a case that is not a constant cannot be compiled"),
        (controls, 1, r"the character U\+0001, which PML cannot hold; remove it"),
        (misses_an_argument, 1, r"tool\(\): missing a required argument: 'name'"),
        (spreads, 1, r"\* and \*\* cannot be compiled; write the arguments"),
        (awaits, 1, "While cannot be compiled"),
        (compares_badly, 2, "'x < 2' cannot be worked out"),
        (returns, 1, "Return cannot be compiled"),
        (annotates_a_stranger, 0, "the annotations cannot be read: name 'Strange' is not defined"),
        (annotates_what_is_not_there, 0, "the annotations cannot be read: .* has no attribute 'Strange'"),
        (annotates_half, 0, "the annotations cannot be read: "),
        (user, 0, "a schema cannot be named 'user'; rename the function"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_nothing_is_silently_dropped(function, line, message):
    error = refusal(function)
    assert re.search(message, error.message)
    assert error.line == function.__code__.co_firstlineno + line


def test_a_function_that_calls_itself_is_refused_at_the_call():
    with pytest.raises(MarkupError) as caught:

        @program
        def again(x: Annotated[str, Len(3)]):
            f"{x}"
            again(x)

    assert caught.value.message == "'again' is not a known program; call only functions that were decorated before"
    assert caught.value.text.strip() == "again(x)"


def test_a_function_without_source_or_that_is_none_is_refused():
    assert "the source of this function cannot be found" in refusal(lambda: "x").message
    assert "is not a function; decorate one that is written with def" in refusal(print).message


def test_a_call_that_the_signature_does_not_allow_is_an_error_at_the_function():
    with pytest.raises(MarkupError, match=r"tool\(\): missing a required argument: 'name'; give it what its signature says"):
        tool()


def test_values_that_cannot_be_compared_are_an_error_at_the_condition():
    @program
    def size(n: int):
        if n < 1:
            "none"

    with pytest.raises(MarkupError, match=r"'n < 1' cannot be worked out: .*; give it values that can be compared"):
        size("x")
