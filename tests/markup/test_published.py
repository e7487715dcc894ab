"""The published examples of the language, spelt as they were published: prompts over files, personas of unions, a parameterised trip."""

import pytest

from .toy import prompt, schema, shown, text_of

CITIES = """<schema name="cities" layout="{layout}">
  <module name="city-info"> About cities.
  </module>
  <module name="trip-plan"> The trip takes
    <param name=" duration"  len="6"/>
  </module>
  <module name="tokyo"> Tokyo.
  </module>
  <module name="miami"> Miami.
  </module> And so on.
</schema>"""


@pytest.mark.parametrize("layout", ["fixed", "compact"])
def test_a_city_with_a_duration(layout):
    bound = prompt(schema(CITIES.format(layout=layout)), '\n  <trip-plan duration=   "3 days"  /> <miami/>  Highlight the surf spots.\n')
    assert text_of(bound) == " The trip takes3 days  Miami. And so on.  Highlight the surf spots."
    assert bound.imported == ("trip-plan", "miami")
    assert shown(bound)[-1][0] == "{  Highlight the surf spots.}"


def test_documents_in_two_languages():
    known = schema(
        '<schema name="s">\n<union>\n<module name="doc-en-US"> Hi </module>\n<module name="doc-zh-CN"> 你好 </module>\n</union></schema>'
    )
    assert text_of(prompt(known, "<doc-zh-CN/>")) == " 你好 "


def test_source_files_as_modules():
    files = "".join(f'<module name="{name}.py">class {name}: ...\n\n</module>\n' for name in ("unit", "map", "player"))
    known = schema(f'<schema name="game"><system>You write Python.</system>\n{files}</schema>')
    bound = prompt(known, "\n<unit.py/>\n<map.py/>\n<player.py/>\n<user>\nCreate a main entry point for\nthe game.\n</user>\n")
    assert text_of(bound) == (
        "<start>system:You write Python.<end>class unit: ...\nclass map: ...\nclass player: ...\n"
        "<start>user:Create a main entry point for\nthe game.<end><start>assistant:"
    )


def test_a_persona_of_unions():
    unions = "".join(
        "<union>" + "".join(f'<module name="{trait}">{trait}. </module>' for trait in traits) + "</union>"
        for traits in (("middle-school", "college"), ("beginner", "expert"), ("auditory", "visual"), ("essay", "quiz"))
    )
    known = schema(f'<schema name="persona"><user>{unions}</user></schema>')
    bound = prompt(
        known, "\n<middle-school/>\n<beginner/>\n<auditory/>\n<essay/>\n<user>\nConcisely describe the learner's profile.\n</user>"
    )
    assert text_of(bound).endswith(
        "<start>user:middle-school. beginner. auditory. essay. <end>"
        "<start>user:Concisely describe the learner's profile.<end><start>assistant:"
    )


def test_a_parameterised_trip():
    known = schema(
        """<schema name="travel">
          <module name="travel-plan">I want to travel for <parameter name="for" length="10" scaffold="a day"/>.
            <union scaffold="overseas">
              <module name="domestic"> At home.</module>
              <module name="overseas"> Abroad:
                <union><module name="tokyo"> Tokyo.</module><module name="paris"> Paris.</module></union>
              </module>
            </union>
          </module>
        </schema>"""
    )
    inner = '<travel-plan for="a week">\n  <overseas>\n    <tokyo/>\n  </overseas>\n</travel-plan>\n<user>\nCreate a travel plan\n</user>'
    assert text_of(prompt(known, inner)) == (
        "I want to travel for a week. Abroad: Tokyo.<start>user:Create a travel plan<end><start>assistant:"
    )
