"""Every error of the language: its place, what was found, and what would be right."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from pando.errors import MarkupError
from pando.markup import binding, layout, reader
from pando.markup.binding import bind
from pando.markup.library import Library
from pando.markup.pml import Limits

from .toy import Toy, prompt, schema


def refused(pml, **more):
    with pytest.raises(MarkupError) as caught:
        schema(pml, **more)
    return caught.value


def refused_prompt(inner, known=None):
    with pytest.raises(MarkupError) as caught:
        prompt(known or TRIP, inner)
    return caught.value


TRIP = schema(
    '<schema name="s"><module name="trip"><param name="days" len="4"/><module name="hotel">H</module></module>'
    '<union><module name="tokyo">T</module><module name="rio">R</module></union></schema>'
)


def inside(text, facts=""):
    return f'<schema name="s"{facts}>\n  {text}\n</schema>'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("^<modul name='a'/>", "unknown element <modul>; did you mean 'module'?"),
        ("^<xyzzy/>", "unknown element <xyzzy>; a schema holds module, union, param, scaffold and roles"),
        ("^<prompt/>", "<prompt> is not allowed in <schema>; move or remove it"),
        ("<module name='a'>^<scaffold modules='a b'/></module>", "<scaffold> stands directly in <schema>; move it there"),
        ("^<module nam='a'/>", "unknown attribute 'nam' of <module>; it takes name, src, cache, encode"),
        ("^<user name='a'/>", "unknown attribute 'name' of <user>; it takes none"),
        ("^<union name='a'/>", "unknown attribute 'name' of <union>; it takes default, scaffold"),
        ("^<module name='1a'/>", "'1a' is not a valid name; a letter or _ comes first, then letters, digits, _ . and -"),
        ("^<module name='a b'/>", "'a b' is not a valid name; a letter or _ comes first, then letters, digits, _ . and -"),
        ("^<module name=''/>", '<module> without a name; give it one, as in <module name="…">'),
        ("^<module name='user'/>", "a module named 'user', which is a word of the language; rename it"),
        ("<module name='a'/>^<module name='a'/>", "a second module 'a' in one scope (the first: line 2); rename one"),
        ("<module name='a'/><union>^<module name='a'/></union>", "a second module 'a' in one scope (the first: line 2); rename one"),
        ("<module name='a'/><user>^<module name='a'/></user>", "a second module 'a' in one scope (the first: line 2); rename one"),
        (
            "<module name='m'><param name='a' len='1'/>^<param name='a' len='1'/></module>",
            "a second param 'a' in one module (the first: line 2); rename one",
        ),
        ("^<union/>", "an empty union; give it at least one <module>"),
        ("^<union>\n  </union>", "an empty union; give it at least one <module>"),
        ("<union>^<user/></union>", '<user> in a union, which holds modules; wrap it in <module name="…">'),
        ("<union>^<module/></union>", "a member of a union without a name, which no prompt could import; give it a name"),
        ("<union>^text<module name='a'/></union>", "text in <union>, which holds only elements; move it"),
        ("^<union default='c'><module name='a'/></union>", "the union's default is 'c', which is no member; its members are a"),
        ("^<union default='a' scaffold='a'><module name='a'/></union>", "both default and scaffold, which mean the same; remove one"),
        (
            "^<param name='x' len='3'/>",
            "a param outside any named module, where no prompt could give it an argument; move it into one",
        ),
        ("<module name='a'>^<param len='3'/></module>", '<param> without a name; give it one, as in <param name="…">'),
        (
            "<module name='a'>^<param name='x'/></module>",
            "param 'x' has no len; give it the most tokens that an argument may have, as in len=\"10\"",
        ),
        ("<module name='a'>^<param name='x' len='two'/></module>", "the len of 'x' is 'two'; it is a number of tokens from 1 to 2000"),
        ("<module name='a'>^<param name='x' len='0'/></module>", "the len of 'x' is '0'; it is a number of tokens from 1 to 2000"),
        ("<module name='a'>^<param name='x' len='99999'/></module>", "the len of 'x' is '99999'; it is a number of tokens from 1 to 2000"),
        (
            "<module name='a'>^<param name='x' len='2' default='abc'/></module>",
            "the default of 'x' has 3 tokens, and its len is 2; shorten it, or raise len",
        ),
        (
            "<module name='a'>^<param name='x' len='2'>b</param></module>",
            "<param> has content, and must be empty: its argument comes with the prompt",
        ),
        ("^<module name='a' cache='no'/>", "cache is 'no'; it is one of true, false"),
        ("^<module name='a' encode='all'/>", "encode is 'all'; it is one of opening, isolated, causal"),
        (
            "^<module cache='false'><module name='a'/></module>",
            "a module without a name that sets encode or cache may hold only text; give it a name",
        ),
        ("<user>^<system/></user>", "<system> inside another role; close that one first"),
        ("<user><module name='a'>^<system/></module></user>", "<system> inside another role; close that one first"),
        ("^<scaffold modules='a'/>", 'a scaffold of 1 modules; it takes two or more, as in <scaffold modules="a b"/>'),
        ("^<scaffold modules='a bb'/><module name='aa'/>", "a scaffold of 'a', which is no module; did you mean 'aa'?"),
        ("^<scaffold modules='a a'/><module name='a'/>", "a scaffold names a module twice; once is enough"),
        (
            "^<scaffold modules='a b'/><module name='a'/><module name='b' cache='false'/>",
            "a scaffold of 'b', which has cache=\"false\": it has no states to join",
        ),
        (
            "^<scaffold modules='a b'/><union><module name='a'/><module name='b'/></union>",
            "a scaffold of 'a' and 'b', which no prompt can import together; name one of them",
        ),
        (
            "^<scaffold modules='a/x b'/><union><module name='a'><module name='x'/></module><module name='b'/></union>",
            "a scaffold of 'a/x' and 'b', which no prompt can import together; name one of them",
        ),
    ],
)
def test_what_a_schema_cannot_say_is_an_error_with_its_place(text, message):
    error = refused(inside(text.replace("^", "")))
    assert error.message == message
    assert (error.file, error.line, error.column) == ("schema", 2, 3 + text.index("^"))
    assert error.shown().splitlines()[-1] == " " * (4 + error.column - 1) + "^"


@pytest.mark.parametrize(
    ("pml", "message"),
    [
        ("<prompt schema='a'/>", '<prompt> at the root; a schema is <schema name="…">…</schema>'),
        ("<schema/>", '<schema> without a name; give it one, as in <schema name="…">'),
        ("<schema name='a' lay='x'/>", "unknown attribute 'lay' of <schema>; it takes name, layout, encode, order"),
        ("<schema name='a' layout='x'/>", "layout is 'x'; it is one of fixed, compact"),
        ("<schema name='a' order='x'/>", "order is 'x'; it is one of schema, free"),
        (
            "<schema name='a' order='free' layout='fixed'/>",
            'order="free" with layout="fixed": a fixed position is an order; use order="schema"',
        ),
    ],
)
def test_what_a_schema_cannot_be_is_an_error_at_its_first_line(pml, message):
    error = refused(pml)
    assert (error.message, error.line, error.column) == (message, 1, 1)


def test_free_order_on_a_model_whose_positions_cannot_move_is_an_error():
    assert "this model's positions cannot move" in refused(inside("", ' order="free"'), movable=False).message


@pytest.mark.parametrize("text", ["<module name='a'/> b", "<user><module name='a'/></user>", "<union><module name='a'/></union>x"])
def test_in_free_order_text_behind_a_module_is_an_error(text):
    assert (
        'text after a module in a schema with order="free", where text may only come first'
        in refused(inside(text, ' order="free"')).message
    )


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ("^<tokio/>", "unknown module <tokio> in schema 's'; did you mean 'tokyo'?"),
        ("^<xyz/>", "unknown module <xyz> in schema 's'; there are trip, tokyo, rio"),
        ("<trip days='1'>^<xyz/></trip>", "unknown module <xyz> in module 'trip'; there are hotel"),
        ("<tokyo>^<xyz/></tokyo>", "unknown module <xyz> in module 'tokyo'; there are none"),
        ("^<hotel/>", "<hotel> is imported outside of its parent; import it inside <trip>"),
        ("<trip days='1'>^<tokyo/></trip>", "<tokyo> is imported outside of its parent; import it inside no other module"),
        ("^<module name='a'/>", "<module> is not allowed in a prompt, which holds imports, roles and text; move or remove it"),
        ("<tokyo/>^<tokyo/>", "<tokyo> is imported twice (first in line 1); remove one"),
        ("<tokyo/>^<rio/>", "<rio> beside <tokyo>, two members of one union; choose one"),
        ("<tokyo/>^<trip days='1'/>", '<trip> comes before its predecessor in the schema; use the schema\'s order, or use order="free"'),
        ("^<trip/>", "<trip> lacks its argument 'days'; write <trip days=\"…\">, or give the param a default"),
        ("^<trip day='1'/>", "unknown argument 'day' of <trip>; did you mean 'days'?"),
        ("^<tokyo day='1'/>", "unknown argument 'day' of <tokyo>; it takes none"),
        ("^<trip days='12345'/>", "the argument 'days' of <trip> has 5 tokens, and 4 are allowed; shorten it, or raise len in the schema"),
        ("<trip days='1'>^<user/></trip>", "<user> in <trip>; in a prompt, a role stands directly in <prompt>"),
        ("<user>^<user/></user>", "<user> in <user>; in a prompt, a role stands directly in <prompt>"),
        ("^<user x='1'/>", "unknown attribute 'x' of <user>; it takes none"),
    ],
)
def test_what_a_prompt_cannot_say_is_an_error_with_its_place(inner, message):
    error = refused_prompt(inner.replace("^", ""))
    assert error.message == message
    assert (error.file, error.line, error.column) == ("prompt", 1, len('<prompt schema="s">') + 1 + inner.index("^"))


def test_an_empty_prompt_is_an_error():
    assert refused_prompt("").message == "an empty prompt; import a module, or write some text"


def test_a_prompt_longer_than_the_context_is_an_error():
    known = schema(inside("abc"), max_len=10)
    assert prompt(known, "1234567").end == 10
    assert refused_prompt("12345678", known).message == "the prompt takes 11 positions, and the model's context has 10; import less"


@pytest.mark.parametrize("encode", ["opening", "isolated", "causal"])
@pytest.mark.parametrize("where", ["compact", "fixed"])
def test_a_module_too_long_for_the_context_window_is_an_error(encode, where):
    error = refused(inside(f"O<module name='a'>{'x' * 31}</module>", f' encode="{encode}" layout="{where}"'), max_len=30)
    end = 31 if encode == "isolated" else 32
    assert error.message == (
        f"module 'a' with what it is encoded behind takes positions up to {end}, and the model's context has 30; shorten or split it"
    )


def test_params_count_for_the_context_window():
    error = refused(inside("<module name='a'>xxx<param name='p' len='8'/></module>"), max_len=10)
    assert (
        error.message == "param 'p' with the text before it takes positions up to 11, and the model's context has 10; shorten or split it"
    )


def test_a_fixed_schema_longer_than_the_context_window_is_an_error_at_the_module_that_passes_it():
    text = "<module name='a'>12345</module><module name='b'>12345</module>"
    error = refused(inside(text, ' layout="fixed"'), max_len=8)
    assert error.message == "module 'b' at its position takes positions up to 10, and the model's context has 8; shorten or split it"
    assert schema(inside(text), max_len=8).layout == "compact", "where nothing has a position of its own, each module must fit"


def test_contexts_without_end_are_refused(monkeypatch):
    monkeypatch.setattr(layout, "MAX_CONTEXTS", 1000)
    many = "".join(f"<module name='m{i}'>x</module>" for i in range(100))
    assert schema(inside(many))
    assert 'see more than 1,000 other texts in total; use encode="opening"' in refused(inside(many, ' encode="causal"')).message


def test_new_texts_without_end_are_refused(monkeypatch):
    monkeypatch.setattr(binding, "MAX_CONTEXTS", 1000)
    many = "".join(f"<module name='m{i}'>x</module>" for i in range(100))
    known, imported = schema(inside(many)), [f"<m{i}/>" for i in range(100)]
    assert prompt(known, "".join(imported) + "y")
    assert "see more than 1,000 other texts in total; join some of them" in refused_prompt("y".join(imported), known).message
    many = many.replace(">x", " cache='false'>x")
    assert len(prompt(schema(inside("Go." + many)), "".join(imported)).runs) == 2, "they are one"


def test_too_many_scaffolds_are_refused():
    text = "<module name='a'/><module name='b'/>" + "<scaffold modules='a b'/>" * 101
    assert refused(inside(text)).message == "101 scaffolds; a schema has at most 100"


# ---- src


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "secret").write_text("secret")
    below = tmp_path / "public"
    below.mkdir()
    (below / "link").symlink_to(tmp_path / "secret")
    (below / "loop").symlink_to(below / "loop")
    (below / "binary").write_bytes(b"\xff\xfe\x00")
    os.mkfifo(below / "pipe")
    return below


def read(src, directory, **more):
    return refused(inside(f"<module name='a' src='{src}'/>"), directory=directory, **more)


@pytest.mark.parametrize("src", ["../secret", "x/../../secret", "/etc/passwd", "link", "./../public/../secret"])
def test_a_src_that_climbs_out_of_its_directory_is_refused(directory, src):
    error = read(src, directory)
    assert error.message == f"src is {src!r}, which lies outside of the directory that files are read from; name a file below it"
    assert str(directory) not in str(error)


@pytest.mark.parametrize(
    ("src", "message"),
    [
        ("nothing", "there is no such file"),
        (".", "there is no such file"),
        ("", "there is no such file"),
        ("pipe", "there is no such file"),
        ("loop", "no such file|cannot be (read|followed)"),
        ("n" * 5000, "cannot be read: File name too long"),
        ("binary", "not UTF-8 at byte 0"),
    ],
)
def test_a_src_that_is_no_text_is_refused(directory, src, message):
    with pytest.raises(MarkupError, match=message):
        schema(inside(f"<module name='a' src='{src}'/>"), directory=directory)


def test_a_src_is_never_read_where_no_directory_was_named(directory):
    assert "no directory was named that files may be read from" in read("binary", None).message


def test_a_src_beside_content_is_refused(directory):
    assert "both src and content" in refused(inside("<module name='a' src='x'>y</module>"), directory=directory).message


def test_the_files_of_a_schema_are_limited_together(tmp_path):
    (tmp_path / "a").write_text("x" * 150)
    assert schema(inside("<module name='a' src='a'/>"), directory=tmp_path, limits=Limits(bytes=200))
    two = inside("<module name='a' src='a'/><module name='b' src='a'/>")
    assert "more than the 50 bytes left" in refused(two, directory=tmp_path, limits=Limits(bytes=200)).message


# ---- by name


@pytest.fixture
def library():
    return Library(Toy(), movable=True, max_len=1000)


def test_a_schema_name_in_use_with_other_content_is_an_error(library):
    first = library.add(inside("one"))
    assert library.add(inside("<!-- again -->one")) is first, "the same content is the same schema"
    with pytest.raises(MarkupError) as caught:
        library.add(inside("two"), file="two.pml")
    assert str(caught.value) == (
        "two.pml:1:1: the name 's' is in use by a schema with different content; remove that one, or choose another name"
    )
    assert library.get("s") is first
    assert library.remove("s") is first
    assert library.add(inside("two")) is not first
    assert library.remove("t") is None


def test_an_unknown_schema_is_an_error(library):
    library.add(inside("one"))
    for asked, message in (("sa", "unknown schema 'sa'; did you mean 's'?"), ("xyz", "unknown schema 'xyz'; add it first")):
        with pytest.raises(MarkupError) as caught:
            library.bind(f"<prompt schema='{asked}'/>")
        assert caught.value.message == message
    found, bound = library.bind("<prompt schema='s'> two</prompt>")
    assert found is library.get("s")
    assert bound.names == ("(opening)", "(prompt)")


@pytest.mark.parametrize(
    ("pml", "message"),
    [
        ("<schema name='s'/>", '<schema> at the root; a prompt is <prompt schema="…">…</prompt>'),
        ("<prompt/>", '<prompt> without a schema; name one, as in <prompt schema="…">'),
        ("<prompt schema='s' x='1'/>", "unknown attribute 'x' of <prompt>; it takes schema"),
    ],
)
def test_what_a_prompt_cannot_be_is_an_error(library, pml, message):
    library.add(inside("one"))
    with pytest.raises(MarkupError) as caught:
        library.bind(pml)
    assert caught.value.message == message


def test_nothing_is_half_registered(library):
    with pytest.raises(MarkupError):
        library.add(inside("<module name='a'/><modul/>"))
    assert len(library) == 0 and list(library) == []


def test_a_prompt_of_another_schema_is_an_error():
    with pytest.raises(MarkupError, match="made from schema 'other', and this schema is 's'; name this one"):
        bind(TRIP, "<prompt schema='other'/>")


def test_of_two_registrations_of_one_name_at_the_same_moment_one_wins(library):
    def add(number):
        try:
            return library.add(inside(f"number {number % 4}"))
        except MarkupError:
            return None

    with ThreadPoolExecutor(8) as pool:
        found = {one for one in pool.map(add, range(64)) if one is not None}
    assert found == {library.get("s")}


def test_a_name_that_no_prompt_could_import_is_refused_in_the_schema():
    error = refused(inside(f'<module name="{"n" * 257}">x</module>'))
    assert (error.line, error.message) == (2, "a name of 257 characters; at most 256 are allowed")
    assert schema(inside(f'<module name="{"n" * 256}">x</module>')).modules[-1].path == "n" * 256


@pytest.mark.parametrize(
    ("text", "advice"),
    [("just words", "a document is one <schema> or one <prompt>"), ('<schema name="s">&#0;</schema>', "XML cannot hold that character")],
)
def test_what_is_malformed_is_advised_by_what_is_wrong(text, advice):
    assert f"; {advice}" in refused(text).message


def test_paths_that_are_too_long_are_refused():
    names = [f"{'n' * 200}{i}" for i in range(6)]
    text = "".join(f"<module name='{name}'>" for name in names) + "</module>" * 6
    assert refused(inside(text)).message == "a module whose path has 1,211 characters; at most 1,024 are allowed: use shorter names"
    schema(inside("".join(f"<module name='{name}'>" for name in names[:5]) + "</module>" * 5))


def test_params_that_are_too_long_together_are_refused(monkeypatch):
    monkeypatch.setattr(reader, "MAX_PLACEHOLDERS", 100)
    params = [f"<module name='m{i}'><param name='p' len='20' default='{i}'/></module>" for i in range(6)]
    assert refused(inside("".join(params))).message == "the params of this schema have more than 100 tokens in total; make them shorter"
    schema(inside("".join(params[:5])))
    schema(inside("".join(f"<module name='m{i}'><param name='p' len='20'/></module>" for i in range(50))))  # equal ones are one


def test_of_thousands_of_names_the_nearest_is_found():
    names = [f"{'abcdefghij'[i % 10]}{i}-{'xyz' * 20}" for i in range(1500)]
    known = schema(inside("".join(f"<module name='{name}'/>" for name in [*names, "the-right-one"])))
    assert refused_prompt("<the-rihgt-one/>", known).message.endswith("did you mean 'the-right-one'?")


def test_modules_within_a_module_keep_their_order_where_that_of_the_schema_is_free():
    known = schema(inside('<module name="p"><module name="a"/><module name="b"/></module><module name="q"/>', ' order="free"'))
    message = "<a> comes before its predecessor in the schema; use the schema's order, as modules inside a module keep it"
    assert refused_prompt("<q/><p><b/><a/></p>", known).message == message


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_the_line_of_an_error_is_shown_however_lines_end(end):
    error = refused(end.join(['<schema name="s">', '<module name="a"/>', '<module nam="b"/>', "</schema>"]))
    assert error.shown().splitlines()[1:] == ['    <module nam="b"/>', "    ^"]
