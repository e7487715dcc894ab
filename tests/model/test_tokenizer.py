"""Text survives the way to tokens and back, in one piece or streamed, and conversations are written as the model learnt them."""

import json
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from pando.errors import BadModelFile, InvalidPrompt, ModelNotFound, UnsupportedModel
from pando.model.gguf import convert
from pando.model.tokenizer import Detokenizer, Tokenizer

HELLO = [{"role": "user", "content": "hello"}]
TRICKY = "héllo  wörld 😀👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 日本語。한국어 العربية\n\t 123 <|im_end|> \ufffd"


def directory_of(tmp_path_factory, tiny_gguf, vocabulary):
    place = tmp_path_factory.mktemp("model")
    convert(tiny_gguf(place.with_suffix(".gguf"), vocabulary=vocabulary), place, lambda done, total: None)
    return place


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory, tiny_gguf):
    return directory_of(tmp_path_factory, tiny_gguf, tiny_gguf.byte_level())


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory, tiny_gguf):
    return directory_of(tmp_path_factory, tiny_gguf, tiny_gguf.sentencepiece())


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def tokenizer(request):
    return Tokenizer.from_directory(request.getfixturevalue(request.param))


@pytest.fixture
def changed(byte_level, tmp_path):
    """A copy of the byte-level model with other files in it."""

    def change(**files):
        for file in byte_level.iterdir():
            if file.suffix == ".json":
                (tmp_path / file.name).write_bytes(file.read_bytes())
        for name, content in files.items():
            stem, suffix = name.rsplit("_", 1)
            path = tmp_path / f"{stem}.{suffix}"
            old = json.loads(path.read_text()) if path.exists() and suffix == "json" else {}
            path.write_text(content if isinstance(content, str) else json.dumps(old | content))
        return Tokenizer.from_directory(tmp_path)

    return change


def streamed(tokenizer, tokens, **options):
    stream = Detokenizer(tokenizer, **options)
    pieces = [stream.add(token) for token in tokens]
    return [*pieces, stream.finish()]


# Encoding and decoding.


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40))
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, special=False)) == text


def test_the_cutting_and_padding_of_a_trainer_are_left_out(changed):
    """Whoever saves a tokenizer after training has them in its file; they are no part of a prompt."""
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    fill = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    plain, trained = changed(), changed(tokenizer_json={"truncation": cut, "padding": fill})
    for text in ("hi", "a longer text than four tokens"):
        for special in (True, False):
            assert trained.encode(text, special=special) == plain.encode(text, special=special)
        assert trained.encode_template(text) == plain.encode_template(text)
        assert trained.encode_with_offsets(text) == plain.encode_with_offsets(text)


def test_special_tokens_are_read_only_where_asked(byte_level):
    tokenizer = Tokenizer.from_directory(byte_level)
    assert tokenizer.encode("<|im_start|>") == [1]
    literal = tokenizer.encode("<|im_start|>", special=False)
    assert 1 not in literal
    assert tokenizer.decode(literal) == "<|im_start|>"


def test_special_tokens_are_shown_only_where_asked(byte_level):
    tokenizer = Tokenizer.from_directory(byte_level)
    tokens = tokenizer.encode("<|im_start|>hello<|im_end|>")
    assert tokenizer.decode(tokens) == "hello"
    assert tokenizer.decode(tokens, skip_special=False) == "<|im_start|>hello<|im_end|>"


def test_a_text_begins_with_bos_once(sentencepiece):
    tokenizer = Tokenizer.from_directory(sentencepiece)
    assert tokenizer.encode("hello")[0] == tokenizer.bos == 1
    assert tokenizer.encode("<s>hello").count(1) == 1
    assert 1 not in tokenizer.encode("hello", special=False)


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_offsets_come_with_the_same_tokens_and_cover_the_text(tokenizer, text):
    tokens, offsets = tokenizer.encode_with_offsets(text)
    assert tokens == tokenizer.encode(text)
    assert len(offsets) == len(tokens)
    assert {place for start, end in offsets for place in range(start, end)} == set(range(len(text)))


def test_offsets_count_characters_and_know_special_tokens(byte_level):
    tokens, offsets = Tokenizer.from_directory(byte_level).encode_with_offsets("<|im_start|>é hello<|im_end|>")
    assert (tokens[0], offsets[0]) == (1, (0, 12))
    assert offsets[1:3] == [(12, 13), (12, 13)]  # two bytes of one character
    assert offsets[-2:] == [(14, 19), (19, 29)]


def test_a_token_that_was_added_has_no_characters(sentencepiece):
    tokens, offsets = Tokenizer.from_directory(sentencepiece).encode_with_offsets("hello")
    assert (tokens[0], offsets[0]) == (1, (0, 0))


def test_a_lone_surrogate_is_refused_with_its_place(tokenizer):
    with pytest.raises(InvalidPrompt, match=r"character 2 .*U\+D83D"):
        tokenizer.encode("ab\ud83dc")


def test_what_is_no_text_is_refused(tokenizer):
    with pytest.raises(InvalidPrompt, match="bytes"):
        tokenizer.encode(b"hello")


def test_a_negative_token_is_refused(tokenizer):
    with pytest.raises(InvalidPrompt, match="-1"):
        tokenizer.decode([-1])


def test_a_token_beyond_the_vocabulary_is_silent(tokenizer):
    """Output layers are padded to round sizes; a model may name a row that no text stands behind."""
    assert tokenizer.decode([tokenizer.vocab_size + 7]) == ""


def test_a_token_shows_its_space(sentencepiece):
    tokenizer = Tokenizer.from_directory(sentencepiece)
    assert [tokenizer.token_text(token) for token in tokenizer.encode("hello world")] == ["<s>", " ", "hello", " world"]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_decoding_agrees_with_the_tokenizers_library(byte_level, data):
    tokenizer, library = Tokenizer.from_directory(byte_level), Library.from_file(str(byte_level / "tokenizer.json"))
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24))
    assert tokenizer.decode(tokens) == library.decode(tokens)
    assert tokenizer.decode(tokens, skip_special=False) == library.decode(tokens, skip_special_tokens=False)


def test_an_added_token_of_spaces_is_spaces(sentencepiece):
    """transformers adds what SentencePiece calls a symbol of the user so, and that may be a run of spaces."""
    library = Library.from_file(str(sentencepiece / "tokenizer.json"))
    library.add_tokens([AddedToken("▁▁▁", normalized=False)])
    tokenizer = Tokenizer(library.to_str(), {}, [], None)
    tokens = [library.token_to_id(token) for token in ("▁", "hello", "▁▁▁", "hello")]
    assert tokenizer.decode(tokens) == "".join(streamed(tokenizer, tokens)) == library.decode(tokens) == "hello   hello"


# Streaming.


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_stream_is_the_text(tokenizer, data):
    known = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12)
    texts = st.text(max_size=8).map(lambda text: tokenizer.encode(text, special=False))
    tokens = [token for part in data.draw(st.lists(st.one_of(known, texts), max_size=5)) for token in part]
    skip = data.draw(st.booleans())
    assert "".join(streamed(tokenizer, tokens, skip_special=skip)) == tokenizer.decode(tokens, skip_special=skip)


def test_half_a_character_is_held_back(tokenizer):
    pieces = streamed(tokenizer, tokenizer.encode(TRICKY, special=False))
    assert "".join(pieces) == TRICKY
    assert sum(piece == "" for piece in pieces) > 20  # most bytes of these characters complete nothing


def test_bytes_that_can_never_be_a_character_do_not_wait(tokenizer):
    byte = {tokenizer.token_bytes(token, skip_special=False): token for token in range(tokenizer.vocab_size)}
    stream = Detokenizer(tokenizer)
    assert stream.add(byte[b"\x80"]) == "\ufffd"
    assert [stream.add(byte[part]) for part in (b"\xf0", b"\x9f", b"a")] == ["", "", "\ufffda"]


def test_what_never_became_whole_comes_at_the_end(tokenizer):
    byte = {tokenizer.token_bytes(token, skip_special=False): token for token in range(tokenizer.vocab_size)}
    stream = Detokenizer(tokenizer)
    assert (stream.add(byte[b"\xf0"]), stream.add(byte[b"\x9f"]), stream.finish()) == ("", "", "\ufffd")


def test_half_a_character_of_the_prompt_is_no_text_of_an_answer_that_says_nothing(tokenizer):
    byte = {tokenizer.token_bytes(token, skip_special=False): token for token in range(tokenizer.vocab_size)}
    assert Detokenizer(tokenizer, prompt_tail=[byte[b"\xf0"]]).finish() == ""
    begun = Detokenizer(tokenizer, prompt_tail=[byte[b"\xf0"]])
    assert (begun.add(byte[b"\x9f"]), begun.finish()) == ("", "\ufffd")


def test_an_answer_keeps_the_space_after_its_prompt(sentencepiece):
    tokenizer = Tokenizer.from_directory(sentencepiece)
    prompt, answer = tokenizer.encode("hello"), tokenizer.encode("hello world")[3:]
    assert "".join(streamed(tokenizer, answer)) == "world"
    assert "".join(streamed(tokenizer, answer, prompt_tail=prompt[-1:])) == " world"
    assert "".join(streamed(tokenizer, answer, prompt_tail=[tokenizer.bos])) == "world"


def test_a_character_that_the_prompt_began_is_completed(tokenizer):
    tokens = tokenizer.encode("a😀b", special=False)
    cut = next(i for i in range(len(tokens)) if tokenizer.decode(tokens[:i]).endswith("\ufffd"))
    assert "".join(streamed(tokenizer, tokens[cut:], prompt_tail=tokens[:cut])) == "😀b"


# What a directory says.


def test_every_end_is_found(changed):
    tokenizer = changed(generation_config_json={"eos_token_id": [0, 2]}, config_json={"eos_token_id": 5})
    assert tokenizer.eos == (2, 0, 5)


def test_a_token_may_be_written_as_a_mapping(changed):
    assert changed(tokenizer_config_json={"bos_token": {"content": "<|endoftext|>", "lstrip": False}}).bos == 0


def test_a_missing_or_broken_tokenizer_is_refused(tmp_path, changed):
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    with pytest.raises(BadModelFile, match=r"tokenizer\.json"):
        changed(tokenizer_json="{}")
    with pytest.raises(BadModelFile, match=r"tokenizer_config\.json"):
        changed(tokenizer_config_json="{")


def test_a_way_of_decoding_that_pando_does_not_know_is_named(changed):
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        changed(tokenizer_json={"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}})


# Conversations.


def test_a_conversation_is_written_by_the_template(byte_level):
    tokenizer = Tokenizer.from_directory(byte_level)
    assert tokenizer.chat(HELLO) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.chat(HELLO, add_generation_prompt=False) == "<|im_start|>user\nhello<|im_end|>\n"
    assert tokenizer.chat(HELLO, template="{{ messages[0].content }}{{ eos_token }}") == "hello<|im_end|>"


def test_a_template_file_goes_before_the_setting(changed):
    assert changed(chat_template_jinja="from a file").chat(HELLO) == "from a file"


def test_the_template_for_tools_is_taken_with_tools(changed):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | tojson }}"}]
    tokenizer = changed(tokenizer_config_json={"chat_template": named})
    assert tokenizer.chat(HELLO) == "plain"
    assert tokenizer.chat(HELLO, tools=[{"name": "größe <b>"}]) == '[{"name": "größe <b>"}]'


def test_templates_find_what_transformers_gives_them(changed):
    template = (
        "{% for m in messages %}\n    {% if loop.index > 1 %}{% break %}{% endif %}\n{% generation %}{{ m.content }}{% endgeneration %}\n"
        "{% endfor %}\n{{ strftime_now('%Y') }}"
    )
    assert changed(chat_template_jinja=template).chat(HELLO * 2) == f"hello{datetime.now().year}"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].nothing.at_all }}", "nothing"),
        ("{{ messages.append(1) }}", "unsafe|safely"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ 'x'.encode('klingon') }}", "unknown encoding: klingon"),
        ("{{ cycler() }}", "at least one item"),
        ("{{ 'long'|truncate(1) }}", "expected length"),
    ],
)
def test_a_template_that_fails_says_why(template, says, byte_level):
    with pytest.raises(InvalidPrompt, match=says):
        Tokenizer.from_directory(byte_level).chat(HELLO, template=template)


def test_a_model_without_a_template_says_what_to_do(sentencepiece):
    with pytest.raises(InvalidPrompt, match="plain prompt"):
        Tokenizer.from_directory(sentencepiece).chat(HELLO)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "one or more"),
        ("hello", "one or more"),
        (None, "one or more"),
        (["hello"], "message 0 is a str"),
        ([*HELLO, {"content": "x"}], 'message 1 has no "role"'),
        ([{"role": "user"}], "NoneType"),
        ([{"role": "user", "content": [{"type": "text"}]}], "list"),
    ],
)
def test_what_is_no_conversation_is_refused(messages, says, byte_level):
    with pytest.raises(InvalidPrompt, match=says):
        Tokenizer.from_directory(byte_level).chat(messages)


# The default model, beside transformers.


@pytest.mark.model
def test_the_default_model_talks_as_in_transformers(default_model):
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.from_directory(default_model.directory), AutoTokenizer.from_pretrained(default_model.directory)
    for text in (TRICKY, "def f(x):\n\treturn x ** 2", "1234567890 3.14", "   spaces   ", "", "<|im_start|>user\n<|im_end|>"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text, special=False)) == text
        assert "".join(streamed(ours, ours.encode(text, special=False))) == text
    conversation = [{"role": "system", "content": "Be brief."}, *HELLO, {"role": "assistant", "content": "Hi 😀"}, *HELLO]
    for messages in (HELLO, conversation):
        for more in (True, False):
            rendered = ours.chat(messages, add_generation_prompt=more)
            assert rendered == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=more)
    tokens = theirs.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]
    assert ours.encode(ours.chat(conversation)) == tokens
    assert (ours.bos, ours.eos, ours.vocab_size) == (1, (2,), 49152)


def test_what_stands_for_nothing_is_a_space_and_not_the_end_of_a_document(changed):
    tokenizer = changed(tokenizer_config_json={"unk_token": "<|endoftext|>"})
    assert tokenizer.decode([tokenizer.unknown], skip_special=False) == " "
