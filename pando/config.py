"""EngineConfig: every option of the engine, its one default, and where a value may come from.

A later source wins: default, TOML file, environment (PANDO_MAX_NUM_SEQS=8), command line (--max-num-seqs 8).
"""

import tomllib
import types
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import InvalidOption

T = TypeVar("T")

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Attention = Literal["auto", "reference"]

ENVIRONMENT_PREFIX = "PANDO_"
AUTO = "auto"  # how None is written in a file, in the environment and on the command line
SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _option(default: T, doc: str, at_least: int | None = None, at_most: int | None = None) -> T:
    return field(default=default, metadata={"doc": doc, "at_least": at_least, "at_most": at_most})


@dataclass(frozen=True)
class EngineConfig:
    model: str = _option(
        "smollm2-135m", "a directory in Hugging Face format, a GGUF file, a Hugging Face repository id, or a catalogue name"
    )
    device: Device = _option("auto", "where the model runs; auto takes a GPU if there is one")
    dtype: DType = _option("auto", "what weights and cache are held in; auto takes bfloat16 where the device multiplies it natively")
    max_model_len: int | None = _option(
        None, "tokens one request may have, prompt and answer together; auto: what the model was made for", 1, 2**31 - 1
    )
    max_num_seqs: int = _option(64, "rows that run at the same time; more requests wait", 1, 2**16)
    max_num_batched_tokens: int = _option(512, "tokens one step computes over all rows; a longer prompt takes several steps", 1, 2**20)
    page_size: int = _option(64, "token slots in a page of the KV cache", 1, 2**12)
    kv_cache_tokens: int | None = _option(None, "token slots in the KV cache; auto: chosen from the free memory", 1, 2**40)
    prefix_caching: bool = _option(True, "reuse the KV cache of prompts that begin alike; answers are the same without it")
    seed: int = _option(0, "where sampling starts for requests that bring no seed of their own", 0, 2**63 - 1)
    threads: int | None = _option(None, "CPU threads; auto: one per core", 1, 2**12)
    attention: Attention = _option("auto", "auto takes the fast path of the device; reference takes the slow definition, for comparison")
    native: bool = _option(True, "use Pando's compiled CPU kernels, which need a C compiler at the first start; otherwise torch's")
    cache_salt: str = _option("", "part of every cache key: requests under different salts never share cached context")

    def __post_init__(self) -> None:
        for option in options():
            _check(option, getattr(self, option.name))
        if self.kv_cache_tokens is not None and self.kv_cache_tokens < self.page_size:
            raise InvalidOption(
                f"kv_cache_tokens is {self.kv_cache_tokens}, less than one page of {self.page_size} tokens; "
                f"raise it to at least {self.page_size} or lower page_size"
            )


def options() -> "tuple[Field[object], ...]":
    return fields(EngineConfig)


def choices(option: "Field[object]") -> tuple[str, ...]:
    """The words an option takes, or none where it takes anything of its type."""
    kind = get_type_hints(EngineConfig)[option.name]
    return get_args(kind) if get_origin(kind) is Literal else ()


def kinds(option: "Field[object]") -> tuple[type, ...]:
    """The Python types of an option: (int, NoneType) for `int | None`; a choice of words is a str."""
    kind = get_type_hints(EngineConfig)[option.name]
    if get_origin(kind) is Literal:
        return (str,)
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def load(cli: Mapping[str, object], environ: Mapping[str, str], file: Path | None) -> EngineConfig:
    """The configuration of this process. A None in `cli` is an option that was not given."""
    known = {option.name: option for option in options()}
    values: dict[str, object] = {}
    for key, value in _read(file).items() if file else ():
        if key not in known:
            raise InvalidOption(f"{file}: unknown option {key!r}; known are {', '.join(known)}")
        values[key] = _take(known[key], value, str(file))
    for key, option in known.items():
        variable = ENVIRONMENT_PREFIX + key.upper()
        if variable in environ:
            values[key] = _take(option, _parse(option, environ[variable], variable), variable)
        given = cli.get(key)
        if given is not None:
            flag = "MODEL" if key == "model" else "--" + key.replace("_", "-")
            values[key] = _take(option, _parse(option, given, flag) if isinstance(given, str) else given, flag)
    if unknown := set(cli) - set(known):
        raise InvalidOption(f"unknown option {sorted(unknown)[0]!r}; known are {', '.join(known)}")
    return EngineConfig(**values)  # type: ignore[arg-type]  # each value was checked against its field


def _read(file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidOption(f"{file}: cannot be read ({error.strerror}); give --config a TOML file") from error
    except ValueError as error:  # malformed TOML and malformed UTF-8 alike
        raise InvalidOption(f"{file}: not valid TOML ({error}); write lines such as max_num_seqs = 8") from error


def _take(option: "Field[object]", value: object, source: str) -> object:
    if value == AUTO and type(None) in kinds(option):
        return None
    try:
        _check(option, value)
    except InvalidOption as error:
        raise InvalidOption(f"{source}: {error}") from None
    return value


def _parse(option: "Field[object]", text: str, source: str) -> object:
    """Text from the environment or the command line as a value of the option's type."""
    if text == AUTO or str in kinds(option):
        return text
    if bool in kinds(option):
        if text.lower() not in SWITCH:
            raise InvalidOption(f"{source}: {option.name} is {text!r}; write one of {', '.join(SWITCH)}")
        return SWITCH[text.lower()]
    try:
        return int(text)
    except ValueError:
        return text  # the check of its type names what is expected


def _check(option: "Field[object]", value: object) -> None:
    allowed = kinds(option)
    if type(value) not in allowed:
        raise InvalidOption(f"{option.name} is {value!r}; it must be {_expected(option)}")
    if (words := choices(option)) and value not in words:
        raise InvalidOption(f"{option.name} is {value!r}; it must be one of {', '.join(words)}")
    low, high = option.metadata["at_least"], option.metadata["at_most"]
    if isinstance(value, int) and low is not None and not low <= value <= high:
        raise InvalidOption(f"{option.name} is {value}; it must be {_expected(option)}")
    if option.name == "model" and not value:
        raise InvalidOption("model is empty; name a directory, a GGUF file, a repository id or a catalogue name (`pando pull --list`)")


def _expected(option: "Field[object]") -> str:
    if bool in kinds(option):
        return "true or false"
    if int not in kinds(option):
        return "text"
    low, high = option.metadata["at_least"], option.metadata["at_most"]
    return f"a whole number from {low} to {high}" + (", or auto" if type(None) in kinds(option) else "")
