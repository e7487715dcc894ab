"""Text to syntax tree: places, whitespace, and what is refused before it costs anything."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pando.errors import InputError, MarkupError
from pando.markup.pml import Element, Limits, Text, parse


def text_in(pml: str) -> list[str]:
    return [child.text for child in parse(pml).children if isinstance(child, Text)]


def refused(pml: str | bytes, **limits: int) -> MarkupError:
    with pytest.raises(MarkupError) as caught:
        parse(pml, "a.pml", Limits(**limits))
    return caught.value


def test_every_element_and_every_text_knows_its_line_and_column():
    root = parse('<schema name="é">\n  Be kind.\n  <module name="a">\n    漢字 <param name="x"/> days\n  </module>\n</schema>')
    kind, module = root.children
    words, param, days = module.children
    assert [(one.at.line, one.at.column) for one in (root, kind, module, words, param, days)] == [
        *[(1, 1), (2, 3), (3, 3)],
        *[(4, 5), (4, 8), (4, 26)],
    ]


def test_comments_cdata_and_the_five_entities_work():
    assert text_in("<a>1 &lt; 2 &amp; 3 &gt; 2 &quot;&apos;<!-- no <b> --> <![CDATA[<b> & c]]></a>") == ["1 < 2 & 3 > 2 \"' <b> & c"]


def test_a_line_that_holds_only_a_comment_is_no_line():
    assert text_in("<a>\n  one\n  <!-- not\n  said -->\n  two\n</a>") == ["one\ntwo"]
    assert text_in("<a><!-- head -->\n  one\n  <!-- tail -->\n</a>") == ["one"]


def test_a_run_is_dedented():
    assert text_in("<a>\n    def f():\n        return 1\n\n    f()\n  </a>") == ["def f():\n    return 1\n\nf()"]
    assert text_in("<a>You are\n    an expert.\n    Really.\n  </a>") == ["You are\nan expert.\nReally."]
    assert text_in("<a>\n\tone\n\t\ttwo\n</a>") == ["one\n\ttwo"]


def test_a_whitespace_only_run_that_contains_a_newline_vanishes():
    assert text_in("<a>\n  <b/>\n\n\n  <c/> <d/>\n</a>") == [" "]


def test_a_leading_or_trailing_line_break_vanishes_with_its_indentation():
    assert text_in("<a>  \n  one\n  </a>") == ["one"]
    assert text_in("<a>\n\n  one\n\n  </a>") == ["\none\n"], "a blank line is a line break that is meant"


def test_inline_spaces_at_an_edge_stay():
    assert text_in("<a> one <b/> two </a>") == [" one ", " two "]
    assert text_in("<a>for <b/> days.\n    Go.\n</a>") == ["for ", " days.\nGo."]


def test_a_space_that_does_not_break_is_text():
    assert text_in("<a>\n  \u00a0\n</a>") == ["\u00a0"]


def test_xml_space_preserve_keeps_a_subtree_verbatim():
    root = parse('<a xml:space="preserve">\n  one <b>\n  two\n</b><c xml:space="default">\n  three\n</c></a>')
    assert root.children[0].text == "\n  one "
    assert root.children[1].children[0].text == "\n  two\n"
    assert root.children[2].children[0].text == "three"
    assert root.attributes == {}


def test_windows_line_breaks_and_a_byte_order_mark_are_no_text():
    root = parse(b'\xef\xbb\xbf<?xml version="1.0" encoding="utf-8"?>\r\n<a>\r\n  one\r\n  two\r\n</a>')
    assert [child.text for child in root.children] == ["one\ntwo"]


@pytest.mark.parametrize(
    ("pml", "line", "column", "message"),
    [
        ("<a>\n  <b>\n</a>", 3, 3, r"mismatched tag; <b> of line 2 must be closed first, with </b>"),
        ("<a>\n  1 < 2\n</a>", 2, 6, r"write < as &lt; and & as &amp;"),
        ("<a>\n  salt & pepper\n</a>", 2, 9, r"write < as &lt; and & as &amp;"),
        ("<a>&nbsp;</a>", 1, 4, r"undefined entity; there are only &lt; &gt; &amp; &quot; and &apos;"),
        ("<param len=2/>", 1, 12, r"every attribute in quotes"),
        ('<a b="1" b="2"/>', 1, 10, r"duplicate attribute; give each attribute once"),
        ("<a/><b/>", 1, 5, r"junk after document element; a document is one <schema> or one <prompt>"),
        ("", 1, 1, r"no element found; a document is one <schema> or one <prompt>"),
        ("just words", 1, 1, r"malformed XML"),
        ("<a><b>", 1, 7, r"no element found; <b> of line 1 must be closed first"),
        ('<a xml:space="keep"/>', 1, 1, r'xml:space is "keep"; it is "preserve" or "default"'),
        ("<a>\n<?php echo 1 ?></a>", 2, 1, r"a processing instruction <\?php …\?>; PML has none"),
    ],
)
def test_malformed_xml_is_an_error_with_its_place(pml, line, column, message):
    error = refused(pml)
    assert (error.file, error.line, error.column) == ("a.pml", line, column)
    assert re.search(message, error.message)
    assert str(error).startswith(f"a.pml:{line}:{column}: ")


def test_an_error_shows_its_line_with_a_caret_under_the_place():
    shown = refused("<schema>\n\t<b>\n  é <c x=1/>\n</b></schema>").shown().splitlines()
    assert shown[1:] == ["      é <c x=1/>", "             ^"]
    assert shown[0].startswith("a.pml:3:10: malformed XML")


def test_of_a_long_line_the_part_around_the_place_is_shown():
    _, line, caret = refused("<a>" + "x" * 1000 + "& " + "y" * 1000 + "</a>").shown().splitlines()
    assert len(line) == 124
    assert line[len(caret) - 2] == "&"


def test_a_markup_error_is_the_users_to_repair():
    assert issubclass(MarkupError, InputError)


ENTITIES = "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 12))


@pytest.mark.parametrize(
    "pml",
    [
        f'<!DOCTYPE s [<!ENTITY a0 "ha">{ENTITIES}]><s>&a11;</s>',
        '<!DOCTYPE s [<!ENTITY secret SYSTEM "file:///etc/passwd">]><s>&secret;</s>',
        '<!DOCTYPE s SYSTEM "http://localhost/evil.dtd"><s/>',
        '<!DOCTYPE s [<!ENTITY % p SYSTEM "file:///etc/passwd">%p;]><s/>',
        "<!DOCTYPE s><s/>",
    ],
    ids=["bomb", "external entity", "external type", "parameter entity", "empty type"],
)
def test_a_document_type_an_external_entity_or_an_entity_bomb_is_refused(pml):
    started = time.thread_time()
    error = refused("<!-- fine -->\n" + pml)
    assert "a document type; PML has none" in error.message
    assert (error.line, error.column) == (2, 1)
    assert time.thread_time() - started < 5


def test_ten_thousand_nested_modules_are_refused():
    error = refused("<module>" * 10_000 + "</module>" * 10_000)
    assert error.message == "elements are nested deeper than 100; flatten the document"
    assert error.column == 100 * len("<module>") + 1


def test_a_document_of_50_megabytes_is_refused_before_it_is_read():
    assert "52,428,800 bytes" in refused(b"<a>" + b"x" * (50 * 2**20 - 3)).message
    assert "at most 16,777,216 are read" in refused("<a>" + "x" * (50 * 2**20 - 3)).message
    assert "9 bytes; at most 8" in refused("<a>é</a>", bytes=8).message, "bytes count, not characters"


def test_too_many_elements_are_refused():
    assert refused("<a>" + "<b/>" * 10 + "</a>", elements=10).message == "more than 10 elements; split the document"
    assert isinstance(parse("<a>" + "<b/>" * 9 + "</a>", "a", Limits(elements=10)), Element)


def test_long_names_and_values_are_refused():
    assert "a name of 300 characters; at most 256" in refused(f"<{'n' * 300}/>").message
    assert "a name of 300 characters; at most 256" in refused(f'<a {"n" * 300}="1"/>').message
    assert parse(f'<{"n" * 256} b="{"v" * 300}"/>').name == "n" * 256
    assert "the value of b has 11 characters; at most 10" in refused('<a b="12345678901"/>', value=10).message


def test_what_is_not_utf_8_is_refused():
    assert "not UTF-8 at byte or character 3" in refused(b"<a>\xff</a>").message
    assert "not UTF-8 at byte or character 3" in refused("<a>\ud800</a>").message


def test_markup_loads_without_torch():
    files = (Path(__file__).parents[2] / "pando" / "markup").glob("*.py")
    load = "; ".join(f"import pando.markup.{file.stem}" for file in files if file.stem != "__init__")
    done = subprocess.run([sys.executable, "-c", f"{load}; import sys; sys.exit('torch' in sys.modules)"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
