"""The vocabulary inside a GGUF file, written as tokenizer.json and tokenizer_config.json.

GGUF stores tokens, their types and either merges (byte-level BPE) or scores (SentencePiece), and names the rule that cuts text into words
before merging; the rules themselves stand here.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import BadModelFile, UnsupportedModel

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # types of tokens

_GPT2, _DIGITS, _LLAMA3, _QWEN2, _FALCON, _BLOOM = "gpt-2", "digits", "llama-3", "qwen2", "falcon", "bloom"
_RULES = {
    **dict.fromkeys(("gpt-2", "default", "mpt", "olmo", "phi-2", "jais"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "falcon": _FALCON,
    "bloom": _BLOOM,
}
_RULE_OF_ARCHITECTURE = {"qwen2": "qwen2", "qwen3": "qwen2", "falcon": "falcon", "bloom": "bloom"}  # of files older than the field
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def write_tokenizer(path: Path, metadata: Mapping[str, Any], into: Path) -> None:
    vocabulary = _Vocabulary(path, metadata)
    tokenizer = vocabulary.tokenizer()
    tokenizer.save(str(into / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata.get(f"{metadata.get('general.architecture')}.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata.get("tokenizer.chat_template"),
        **{name: vocabulary.named(key) for name, key in _NAMED.items()},
    }
    text = json.dumps({name: value for name, value in config.items() if value is not None}, indent=2, ensure_ascii=False)
    (into / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


class _Vocabulary:
    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path = path
        self.metadata = metadata
        self.tokens: list[str] = self._texts("tokens")
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if not self.tokens or len(self.ids) < len(self.tokens):
            raise BadModelFile(f"{path}: {len(self.tokens)} tokens, {len(self.ids)} of them different; the vocabulary is corrupt")
        kinds = metadata.get("tokenizer.ggml.token_type")
        self.kinds: Sequence[int] = [_NORMAL] * len(self.tokens) if kinds is None else [int(kind) for kind in kinds]
        if len(self.kinds) != len(self.tokens):
            raise BadModelFile(f"{path}: {len(self.tokens)} tokens but {len(self.kinds)} token types; the vocabulary is corrupt")

    def named(self, name: str) -> str | None:
        index = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if index is None:
            return None
        if not isinstance(index, int) or not 0 <= index < len(self.tokens):
            raise BadModelFile(f"{self.path}: {name}_token_id is {index!r} in a vocabulary of {len(self.tokens)}; the file is corrupt")
        return self.tokens[index]

    def tokenizer(self) -> Tokenizer:
        kind = self.metadata.get("tokenizer.ggml.model")
        if kind == "gpt2":
            tokenizer = self._byte_level()
        elif kind == "llama":
            tokenizer = self._sentencepiece()
        else:
            raise UnsupportedModel(
                f"{self.path}: tokenizer {kind!r}; Pando converts 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE)"
            )
        self._add_tokens(tokenizer)
        return tokenizer

    def _byte_level(self) -> Tokenizer:
        rule = self._rule()
        merges = [tuple(merge.split(" ")) for merge in self._texts("merges")]
        tokenizer = self._bpe(merges, ignore_merges=rule == _LLAMA3)
        tokenizer.pre_tokenizer = _cut(rule)
        if rule == _QWEN2:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = self._frame(begin=rule == _LLAMA3) or processors.ByteLevel(trim_offsets=False)
        return tokenizer

    def _sentencepiece(self) -> Tokenizer:
        tokenizer = self._bpe(self._merges_of_scores(), unk_token=self.named("unknown"), fuse_unk=True, byte_fallback=True)
        prefix = bool(self.metadata.get("tokenizer.ggml.add_space_prefix", True))
        spaces = [normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if prefix else spaces)
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
        frame = self._frame(begin=True)
        if frame is not None:
            tokenizer.post_processor = frame
        return tokenizer

    def _bpe(self, merges: list[Any], **options: Any) -> Tokenizer:
        try:
            return Tokenizer(models.BPE(self.ids, merges, **options))
        except Exception as error:  # the library raises nothing more precise
            raise BadModelFile(f"{self.path}: merges and tokens do not fit together ({error}); the vocabulary is corrupt") from error

    def _rule(self) -> str:
        name = self.metadata.get("tokenizer.ggml.pre")
        if name is None or name == "default":
            name = _RULE_OF_ARCHITECTURE.get(self.metadata.get("general.architecture", ""), "gpt-2")
        if name not in _RULES:
            raise UnsupportedModel(f"{self.path}: pre-tokenizer {name!r}; Pando knows {', '.join(_RULES)}")
        return _RULES[name]

    def _merges_of_scores(self) -> list[tuple[str, str]]:
        """SentencePiece joins the neighbours whose union scores best; as ranked merges: every cut of a token, best-scoring token first."""
        scores = self.metadata.get("tokenizer.ggml.scores")
        if scores is None or len(scores) != len(self.tokens):
            raise BadModelFile(f"{self.path}: {len(self.tokens)} tokens without a score for each; the vocabulary is corrupt")
        ranked = sorted((i for i, kind in enumerate(self.kinds) if kind == _NORMAL), key=lambda i: -float(scores[i]))
        merges: list[tuple[str, str]] = []
        for token in (self.tokens[i] for i in ranked):
            cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
            known = [cut for cut in cuts if cut[0] in self.ids and cut[1] in self.ids]
            merges += sorted(known, key=lambda cut: (self.ids[cut[0]], self.ids[cut[1]]))
        return merges

    def _frame(self, begin: bool) -> processors.TemplateProcessing | None:
        """What encoding adds around the text: `begin` is the rule of this kind of vocabulary where the file does not say."""
        ends = {"bos": begin, "eos": False}
        wanted = {name: self.metadata.get(f"tokenizer.ggml.add_{name}_token", default) for name, default in ends.items()}
        first, last = (self.named(name) if wanted[name] else None for name in ends)
        if first is None and last is None:
            return None
        specials = [(token, self.ids[token]) for token in (first, last) if token is not None]
        pieces = [*([f"{first}:0"] if first else []), "$A:0", *([f"{last}:0"] if last else [])]
        return processors.TemplateProcessing(single=pieces, special_tokens=specials)

    def _add_tokens(self, tokenizer: Tokenizer) -> None:
        ends = {token for token in map(self.named, _NAMED.values()) if token is not None}
        special = [token for token, kind in zip(self.tokens, self.kinds, strict=True) if kind in (_CONTROL, _UNKNOWN) or token in ends]
        literal = [token for token, kind in zip(self.tokens, self.kinds, strict=True) if kind == _USER_DEFINED and token not in ends]
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in literal])

    def _texts(self, name: str) -> list[str]:
        texts = self.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise BadModelFile(f"{self.path}: no tokenizer.ggml.{name} in the metadata; the file holds no usable vocabulary")
        return texts


def _cut(rule: str) -> pre_tokenizers.PreTokenizer:
    """Text into the words that merges never cross."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if rule == _GPT2:
        return words
    if rule == _DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if rule == _FALCON:
        threes = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")
        marks, numbers = pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.Digits(individual_digits=False)
        return pre_tokenizers.Sequence([marks, words, numbers, threes])
    patterns = {_LLAMA3: _WORDS % "{1,3}", _QWEN2: _WORDS % "", _BLOOM: r" ?[^(\s|[.,!?…。，、।۔،])]+"}
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(patterns[rule]), "isolated"), bytes_only])
