"""A drift between turns is named, and nothing else is called one."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Vocabulary
from tokenizers import decoders, models, pre_tokenizers

from pando.kv.segment import shared_length
from pando.model.tokenizer import Tokenizer
from pando.server.history import Drift, History, message_at, message_starts
from tests.tiny import END, tiny_tokenizer

TENANT = b"tenant"
DECODE = tiny_tokenizer().decode
TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}[assistant]"
DROPS_THOUGHTS = "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}<end>{% endfor %}[assistant]"
COUNTS = "[{{ messages | length }} so far]" + TURNS
CALLS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}{% endfor %}<end>{% endfor %}[assistant]"
)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def merging_tokenizer():
    """Knows `hello` and `é` as one token each, which a model may also spell in letters and bytes."""
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ã", "©")]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    library = Vocabulary(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<end>"])
    return Tokenizer(library.to_str(), {"eos_token": "<end>"}, [], TURNS)


class Chat:
    """A server's part in a conversation: renders, answers with the given tokens, remembers."""

    def __init__(self, template=TURNS, tokenizer=None, session="a", history=None):
        self.tokenizer = tokenizer or tiny_tokenizer()
        self.template, self.session = template, session
        self.history = history or History(self.tokenizer.decode)

    def prompt(self, messages):
        return self.tokenizer.encode(self.tokenizer.chat(messages, template=self.template))

    def answer(self, messages, answer, generated=None, tenant=TENANT):
        """The model writes the answer's text and ends its turn, unless it is said to have generated something else."""
        prompt = self.prompt(messages)
        written = [*self.tokenizer.encode(answer["content"], special=False), *self.tokenizer.eos] if generated is None else generated
        self.history.remember(tenant, messages, answer, [*prompt, *written], len(prompt), self.session)
        return [*messages, answer]

    def explain(self, messages, tenant=TENANT):
        return self.history.explain(tenant, messages, self.prompt(messages), self.session)


# What is no drift.


def test_a_conversation_that_continues_did_not_drift():
    chat = Chat()
    messages = [user("one")]
    for _ in range(3):
        assert chat.explain(messages) is None
        messages = [*chat.answer(messages, assistant("two")), user("three")]


def test_nothing_is_said_of_an_unknown_conversation():
    assert Chat().explain([user("one"), assistant("two"), user("three")]) is None


def test_another_tenant_is_told_nothing():
    chat = Chat(DROPS_THOUGHTS)
    turn = [*chat.answer([user("one")], assistant("<think>hm</think>two")), user("three")]
    assert chat.explain(turn) is not None
    assert chat.explain(turn, tenant=b"other") is None


def test_an_end_that_the_template_writes_differently_is_no_drift():
    chat = Chat("{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]")
    assert chat.explain([*chat.answer([user("one")], assistant("two")), user("three")]) is None


def test_an_answer_cut_at_its_limit_is_no_drift():
    chat = Chat()
    turn = chat.answer([user("one")], assistant("tw"), generated=chat.tokenizer.encode("tw"))
    assert chat.explain([*turn, user("three")]) is None


@pytest.mark.parametrize("stop", ["\n\nUser:", "STOP"])
def test_a_stop_string_that_was_generated_is_no_drift(stop):
    chat = Chat()
    turn = chat.answer([user("one")], assistant("two"), generated=chat.tokenizer.encode("two" + stop))
    assert chat.explain([*turn, user("three")]) is None


@pytest.mark.parametrize("decode", [DECODE, lambda tokens: DECODE(tokens).removeprefix(" ")], ids=["keeps a first space", "drops it"])
def test_a_stop_string_is_no_drift_after_a_first_space(decode):
    chat = Chat(history=History(decode))
    turn = chat.answer([user("one")], assistant(" two"), generated=chat.tokenizer.encode(" twoSTOP"))
    assert chat.explain([*turn, user("three")]) is None


def test_asking_again_is_no_drift():
    chat = Chat()
    chat.answer([user("one")], assistant("two"))
    assert chat.explain([user("one")]) is None


def test_a_new_conversation_under_the_same_name_is_no_drift():
    chat = Chat()
    chat.answer([{"role": "system", "content": "Be brief."}, user("one")], assistant("two"))
    assert chat.explain([{"role": "system", "content": "Be brief."}, user("another")]) is None


def test_a_question_asked_anew_in_the_middle_is_no_drift():
    chat = Chat()
    first = chat.answer([user("one")], assistant("two"))
    chat.answer([*first, user("three")], assistant("four"))
    assert chat.explain([*first, user("another three")]) is None


# What is.


def test_a_template_that_drops_earlier_thoughts_is_named():
    chat = Chat(DROPS_THOUGHTS)
    turn = chat.answer([user("one")], assistant("<think>hm</think>two"))
    assert chat.explain([*turn, user("three")]) == Drift("template_rewrote_history", len(chat.prompt([user("one")])), 1)


def test_a_template_that_changes_the_beginning_is_named_with_the_first_token_that_differs():
    chat = Chat(COUNTS)
    turn = chat.answer([user("one")], assistant("two"))
    assert chat.explain([*turn, user("three")]) == Drift("template_rewrote_history", len("["))


def test_a_call_that_the_template_writes_in_another_way_is_named():
    chat = Chat(CALLS)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    answer = assistant(None, tool_calls=[call])
    turn = chat.answer([user("one")], answer, generated=[*chat.tokenizer.encode('<call>{"x":1}'), END])
    drift = chat.explain([*turn, {"role": "tool", "tool_call_id": "1", "content": "2"}])
    assert drift == Drift("template_rewrote_history", len(chat.prompt([user("one")])) + len('<call>{"x":'), 1)


def test_an_answer_that_becomes_other_tokens_is_named():
    chat = Chat(tokenizer=merging_tokenizer())
    letters = [token for char in "say hello" for token in chat.tokenizer.encode(char)]
    turn = chat.answer([user("one")], assistant("say hello"), generated=[*letters, *chat.tokenizer.eos])
    assert chat.explain([*turn, user("three")]) == Drift("answer_retokenised", len(chat.prompt([user("one")])) + len("say "), 1)


@pytest.mark.parametrize(("said", "stop"), [("hello", "STOP"), ("hello é", ""), ("ü" * 20 + "hello", "")])
def test_an_answer_is_followed_through_stop_strings_and_long_characters(said, stop):
    chat = Chat(tokenizer=merging_tokenizer())
    letters = [token for char in said + stop for token in chat.tokenizer.encode(char)]
    turn = chat.answer([user("one")], assistant(said), generated=[*letters, *chat.tokenizer.eos])
    assert chat.explain([*turn, user("three")]).kind == "answer_retokenised"


def test_a_character_that_was_generated_in_two_halves_is_a_drift():
    chat = Chat(tokenizer=merging_tokenizer())
    byte = {chat.tokenizer.token_bytes(token, skip_special=False): token for token in range(chat.tokenizer.vocab_size)}
    turn = chat.answer([user("one")], assistant("aé"), generated=[byte[b"a"], byte[b"\xc3"], byte[b"\xa9"], *chat.tokenizer.eos])
    assert chat.explain([*turn, user("three")]) == Drift("answer_retokenised", len(chat.prompt([user("one")])) + 1, 1)


def test_a_drift_is_told_once_as_the_next_turn_continues_the_new_tokens():
    chat = Chat(tokenizer=merging_tokenizer())
    letters = [token for char in "hello" for token in chat.tokenizer.encode(char)]
    turn = [*chat.answer([user("one")], assistant("hello"), generated=letters), user("three")]
    assert chat.explain(turn) is not None
    assert chat.explain([*chat.answer(turn, assistant("four")), user("five")]) is None


def test_a_client_that_trims_an_answer_changed_history():
    chat = Chat()
    first = chat.answer([user("one")], assistant("two"))
    second = chat.answer([*first, user("three")], assistant("four \n"))
    sent = [*second[:-1], assistant("four"), user("five")]
    drift = chat.explain(sent)
    assert drift == Drift("history_changed", len(chat.prompt(second[:-1])) + len("four"), 3)
    assert "unchanged" in drift.detail and "message 3" in drift.detail


def test_a_client_that_drops_the_oldest_turns_changed_history():
    chat = Chat()
    messages = [{"role": "system", "content": "Be brief."}]
    for text in ("one", "two", "three"):
        messages = chat.answer([*messages, user(text)], assistant("yes"))
    assert chat.explain([messages[0], *messages[3:], user("four")]).message == 1
    assert chat.explain([messages[0], *messages[3:], user("four")]).kind == "history_changed"


def test_a_changed_history_needs_a_session_to_be_seen():
    chat = Chat(session=None)
    chat.answer([user("one")], assistant("two "))
    assert chat.explain([user("one"), assistant("two"), user("three")]) is None


def test_a_change_that_the_template_does_not_show_lost_nothing():
    chat = Chat()
    chat.answer([user("one")], assistant("two"))
    assert chat.explain([{**user("one"), "name": "Ada"}, assistant("two"), user("three")]) is None


def test_asking_again_after_an_example_of_an_answer_changed_nothing():
    chat = Chat(COUNTS)
    asked = [user("1"), assistant("one"), user("2")]
    chat.answer(asked, assistant("two"))
    chat.template = TURNS
    assert chat.explain(asked) is None


def test_a_known_conversation_is_not_measured_by_another_of_its_session():
    chat = Chat()
    known = chat.answer([user("one")], assistant("two"))
    chat.answer([user("other")], assistant("words"))
    assert chat.explain([*known, user("three"), assistant("of another server"), user("five")]) is None


def test_two_sessions_with_the_same_words_are_both_known():
    history = History(DECODE)
    chats = [Chat(session=name, history=history) for name in ("a", "b")]
    for chat in chats:
        chat.answer([user("one")], assistant("two"))
    assert all(chat.explain([user("one"), assistant("too"), user("three")]).kind == "history_changed" for chat in chats)


@pytest.mark.parametrize("kind", ["template_rewrote_history", "answer_retokenised", "history_changed"])
def test_every_drift_says_where(kind):
    drift = Drift(kind, 812)
    assert "token 812" in drift.detail and "message" not in drift.detail.split("812")[1].split(";")[0]
    assert "token 812 (message 3)" in replace(drift, message=3).detail


# Which messages are the same.


@pytest.mark.parametrize(
    ("returned", "sent"),
    [
        (assistant("two"), assistant([{"type": "text", "text": "t"}, {"type": "text", "text": "wo"}])),
        (assistant("two"), assistant("two", tool_calls=None, refusal=None, name=None)),
        (
            assistant("", tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}}]),
            assistant(None, tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 2, "b": 1}}}]),
        ),
    ],
)
def test_a_message_is_known_in_every_spelling(returned, sent):
    history = History(DECODE)
    history.remember(TENANT, [user("one")], returned, [1, 2, 3, 4], 2, None)
    assert history.explain(TENANT, [user("one"), sent], [1, 9, 3, 4], None) == Drift("template_rewrote_history", 1)


@pytest.mark.parametrize(
    "sent",
    [
        assistant("two "),
        assistant("Two"),
        user("two"),
        assistant("two", tool_calls=[{"id": "1", "function": {"name": "f", "arguments": "{}"}}]),
        assistant("two", name="Ada"),
    ],
)
def test_a_message_that_differs_is_another(sent):
    history = History(DECODE)
    history.remember(TENANT, [user("one")], assistant("two"), [1, 2, 3, 4], 2, None)
    assert history.explain(TENANT, [user("one"), sent], [1, 9, 3, 4], None) is None


def test_arguments_nested_too_deep_for_json_do_no_harm():
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    history = History(DECODE)
    for arguments in ("[" * 100_000, deep):
        call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
        history.remember(TENANT, [user("one")], assistant(None, tool_calls=[call]), [1, 2, 3], 2, None)
        assert history.explain(TENANT, [user("one"), assistant(None, tool_calls=[call])], [1, 2, 3, 4], None) is None


# Bounds.


def test_the_oldest_conversations_are_forgotten():
    chat = Chat(DROPS_THOUGHTS, session=None, history=History(DECODE, max_conversations=2))
    turns = [[*chat.answer([user(text)], assistant("<think>hm</think>ok")), user("on")] for text in "abc"]
    assert [chat.explain(turn) is None for turn in turns] == [True, False, False]


def test_a_turn_larger_than_all_the_memory_displaces_nothing():
    chat = Chat(DROPS_THOUGHTS, history=History(DECODE, max_tokens=200))
    turn = [*chat.answer([user("a")], assistant("<think>hm</think>ok")), user("on")]
    chat.answer([user("b" * 1000)], assistant("ok"))
    assert chat.explain(turn) is not None and chat.history.turns == 1


text = st.text(alphabet="ab é😀\ufffd", max_size=4) | st.just("\ud83d")
calls = st.none() | st.lists(st.fixed_dictionaries({"id": text, "function": st.fixed_dictionaries({"name": text, "arguments": text})}))
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.none() | text}, optional={"tool_calls": calls}
)
tokens = st.lists(st.integers(0, 260), max_size=12)
session = st.none() | st.sampled_from("abc")


@settings(max_examples=100, deadline=None)
@given(data=st.data(), conversations=st.integers(0, 3), memory=st.integers(0, 120))
def test_whatever_is_said_the_bounds_hold_and_a_drift_is_where_the_tokens_differ(data, conversations, memory):
    history = History(DECODE, conversations, memory)
    kept = []
    for _ in range(data.draw(st.integers(1, 4))):
        messages, prompt, generated, name = data.draw(st.tuples(st.lists(message, max_size=3), tokens, tokens, session))
        answer = data.draw(message)
        history.remember(TENANT, messages, answer, [*prompt, *generated], len(prompt), name)
        assert max(history.turns, len(history._sessions)) <= conversations and 0 <= history.weight <= memory
        kept.append(([*messages, answer], [*prompt, *generated]))
        known, old = data.draw(st.sampled_from(kept))
        asked = [*known, *data.draw(st.lists(message, max_size=2))]
        new = [*old[: data.draw(st.integers(0, len(old)))], *data.draw(tokens)]
        drift = history.explain(TENANT, asked, new, data.draw(session))
        if drift is not None:
            assert drift.detail and (drift.message or 0) < len(asked)
            assert drift.token in {shared_length(tokens, new) for _, tokens in kept} and drift.token < len(new)


@settings(max_examples=100, deadline=None)
@given(answer=st.text(st.characters(exclude_categories=["Cs"]), max_size=20), following=st.text(max_size=8, alphabet="ab<>\n"))
def test_an_answer_sent_back_as_it_came_never_drifts_where_bytes_are_tokens(answer, following):
    chat = Chat()
    answer = answer.replace("<end>", "")
    assert chat.explain([*chat.answer([user("one")], assistant(answer)), user(following)]) is None


def test_many_threads_may_remember_and_ask():
    chat = Chat(DROPS_THOUGHTS, session=None, history=History(DECODE, max_conversations=8))

    def work(number):
        return chat.explain([*chat.answer([user(str(number))], assistant("<think>hm</think>ok")), user("on")])

    with ThreadPoolExecutor(8) as pool:
        drifts = list(pool.map(work, range(200)))
    assert {drift.kind for drift in drifts if drift} == {"template_rewrote_history"}
    kept = chat.history._turns.values()
    assert chat.history.turns == 8 and chat.history.weight == sum(turn.weight for turn in kept)


# Messages in a rendered prompt.


def placed(contents, template=TURNS, tokenizer=None):
    tokenizer = tokenizer or tiny_tokenizer()
    rendered = tokenizer.chat([user(content) for content in contents], template=template)
    tokens, offsets = tokenizer.encode_with_offsets(rendered)
    starts = message_starts(rendered, contents, offsets)
    return starts, [tokenizer.decode(tokens[start:])[: len(content.strip())] for start, content in zip(starts, contents, strict=True)]


def test_every_message_is_found_in_the_prompt():
    contents = ["Be brief.", "héllo 😀", "same", "same", "last"]
    starts, found = placed(contents)
    assert found == contents and starts == sorted(set(starts))


def test_a_message_that_the_template_trims_is_found():
    _, found = placed(["one", "  two \n", "three"], "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    assert found == ["one", "two", "three"]


def test_an_empty_or_missing_message_starts_where_the_one_before_does():
    starts, _ = placed(["one", "", "three"])
    assert starts[0] == starts[1] < starts[2]
    starts, _ = placed(["one", "two", "three"], "{{ messages[0].content }} {{ messages[2].content }}")
    assert starts == [0, 0, 4]
    assert placed(["", "two"])[0][0] == 0


def test_a_token_that_was_added_at_the_end_hides_nothing():
    assert message_starts("ab", ["b"], [(0, 0), (0, 1), (1, 2), *[(0, 0)] * 5]) == [2]


def test_a_token_belongs_to_the_last_message_begun():
    starts = [3, 10, 10, 20]
    assert [message_at(starts, token) for token in (0, 3, 9, 10, 19, 20, 99)] == [0, 0, 0, 1, 1, 3, 3]
    assert message_at([], 5) == 0


@settings(max_examples=100, deadline=None)
@given(contents=st.lists(st.text(alphabet="ab \n[", max_size=5), max_size=6), rendered=st.text(alphabet="ab \n[]", max_size=40))
def test_starts_are_in_order_and_inside_the_prompt_whatever_the_template_did(contents, rendered):
    tokens, offsets = tiny_tokenizer().encode_with_offsets(rendered)
    starts = message_starts(rendered, contents, offsets)
    assert len(starts) == len(contents) and starts == sorted(starts)
    assert all(0 <= start <= len(tokens) for start in starts)
    assert all(0 <= message_at(starts, token) < max(1, len(starts)) for token in range(len(tokens) + 1))
