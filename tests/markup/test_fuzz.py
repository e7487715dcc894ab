"""Whatever comes, it is a schema, a prompt, or a MarkupError."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from pando.errors import MarkupError
from pando.kv.run import Run
from pando.markup.binding import bind
from pando.markup.pml import parse

from .toy import prompt, schema

PIECES = (
    *('<schema name="s">', '<schema name="s" layout="fixed">', '<schema name="s" encode="causal" order="free">', "</schema>"),
    *('<module name="a">', '<module name="b" cache="false">', '<module name="c" encode="isolated"/>', "<module>", "</module>"),
    *("<union>", '<union default="a">', "</union>", '<param name="x" len="3"/>', '<param name="y" len="2" default="d"/>'),
    *('<scaffold modules="a b"/>', "<user>", "</user>", "<system>", "</system>", "text", " ", "\n  ", "&lt;", "&", "<![CDATA[<]]>"),
    *("<!-- c -->", "<a>", "<a/>", '<a x="1"/>', '<a x="1">', "</a>", "<b/>", '<c xml:space="preserve">', "</c>"),
    *("<!DOCTYPE s>", "<?x y?>", "\0", "é", "\ud800", '<module name="a" src="../x"/>'),
)


class Writer:
    """Writes a sound schema, and beside it a sound prompt of some of its modules."""

    def __init__(self, draw):
        self.draw, self.count, self.paths = draw, 0, []  # of modules that are cached

    def chance(self, one_in=2):
        return self.draw(st.integers(1, one_in)) == 1

    def scope(self, depth, path="", cached=True):
        """What stands in a module, what a prompt says to it, and the arguments."""
        schema, prompt, arguments = "", "", ""
        for kind in self.draw(st.lists(st.sampled_from(["text", "param", "module", "module", "union"]), max_size=4)):
            if kind == "text":
                schema += self.draw(st.sampled_from(["ab", "c d", "e"]))
            elif kind == "param" and depth:
                self.count += 1
                schema += f'<param name="p{self.count}" len="3"/>'
                argument = self.draw(st.sampled_from(["", "x", "xyz"]))
                arguments += f' p{self.count}="{argument}"'
            elif kind == "module" and depth < 3:
                inner, imported = self.module(depth, path, cached)
                schema, prompt = schema + inner, prompt + (imported if self.chance() else "")
            elif kind == "union" and depth < 3:
                members = [self.module(depth, path, cached) for _ in range(self.draw(st.integers(1, 3)))]
                names = [" default=" + inner.split("name=")[1].split(">")[0].split(" ")[0] for inner, _ in members]
                default = self.draw(st.sampled_from(["", *names]))
                schema += f"<union{default}>" + "".join(inner for inner, _ in members) + "</union>"
                prompt += self.draw(st.sampled_from(members))[1] if self.chance() else ""
            prompt += "-" if self.chance(6) else ""
        return schema, prompt, arguments

    def module(self, depth, path, cached):
        self.count += 1
        name = f"m{self.count}"
        facts = self.draw(st.sampled_from(["", "", "", ' encode="causal"', ' encode="isolated"', ' cache="false"']))
        cached = cached and "false" not in facts
        self.paths += [f"{path}{name}"] if cached else []
        schema, prompt, arguments = self.scope(depth + 1, f"{path}{name}/", cached)
        return f'<module name="{name}"{facts}>{schema}</module>', f"<{name}{arguments}>{prompt}</{name}>"


@st.composite
def sound(draw):
    writer = Writer(draw)
    body, inner, _ = writer.scope(0)
    layout = draw(st.sampled_from(["fixed", "compact"]))
    encode = draw(st.sampled_from(["opening", "isolated", "causal"]))
    opening = draw(st.sampled_from(["", "Open."]))
    joined = draw(st.lists(st.sampled_from(writer.paths), min_size=2, max_size=3, unique=True)) if len(writer.paths) > 1 else []
    scaffold = f'<scaffold modules="{" ".join(joined)}"/>' if joined and writer.chance() else ""
    return f'<schema name="s" layout="{layout}" encode="{encode}">{opening}{body}{scaffold}</schema>', inner


def states(runs: Sequence[Run]) -> list[int]:
    """A model in a line: the state of a token is whatever it saw. Each run is computed as its origin says, or where it stands."""
    found: list[int] = []
    for run in runs:
        seen = list(found) if run.origin is None else states(run.origin.context)
        first = run.position if run.origin is None else run.origin.first
        before = len(seen)
        for place, token in enumerate(run.tokens):
            seen.append(hash((tuple(seen), token, first + place)))
        found += seen[before:]
    return found


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200), st.lists(st.sampled_from(PIECES), max_size=25).map("".join)))
@settings(max_examples=400, deadline=None)
def test_whatever_comes_is_parsed_or_refused(document):
    with suppress(MarkupError):
        parse(document)
    with suppress(MarkupError):
        schema(document)


@given(sound(), st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_whatever_is_bound_stands_in_order_and_is_exact_if_it_says_so(documents, bos, movable):
    pml, inner = documents
    movable = movable or "compact" in pml
    try:
        known = schema(pml, bos=bos, movable=movable)
        bound = prompt(known, inner)
    except MarkupError as error:
        if all(one not in error.message for one in ("the hole there has room for", "an empty prompt", "no prompt can import together")):
            raise
        return
    end = 0
    for run in bound.runs:
        assert run.position == end if known.layout == "compact" else run.position >= end
        assert movable or run.shift == 0
        end = run.end
        if run.origin is not None:
            context = run.origin.context
            assert all(a.end <= b.position for a, b in pairwise(context))
            assert not context or context[-1].end <= run.origin.first
    if bound.exact:
        plain = Run(tuple(token for run in bound.runs for token in run.tokens), 0)
        assert states(bound.runs) == states([plain])
    assert len(bound.names) == len(bound.runs)
    assert sum(map(len, bound.runs)) == bound.module_tokens + bound.new_tokens


@given(st.binary(min_size=1, max_size=8), st.integers(0, 400), st.integers(0, 12))
@settings(max_examples=400, deadline=None)
def test_a_damaged_document_is_parsed_or_refused(noise, place, cut):
    sound = b"""<schema name="s"><system>Be kind.</system>
      <module name="a">For <param name="x" len="5"/> days. <!-- c --><union default="n"><module name="n">N &amp; N</module></union></module>
      <module name="b" cache="false" encode="causal"><![CDATA[ <raw> ]]></module><scaffold modules="a a/n"/></schema>"""
    damaged = sound[:place] + noise + sound[place + cut :]
    with suppress(MarkupError):
        known = schema(damaged)
        bind(known, f'<prompt schema="{known.name}"><a x="1"><n/></a><b/></prompt>')
