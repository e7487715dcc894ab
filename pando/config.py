"""EngineConfig and ServerConfig: every option, its one default, and where a value may come from.

A later source wins: default, TOML file, environment (PANDO_MAX_NUM_SEQS=8), command line (--max-num-seqs 8). An option that takes several
values is an array in the file, separated by commas in the environment, and a flag given several times on the command line.
"""

import re
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Literal, TypeVar, Union, get_args, get_origin
from urllib.parse import urlsplit

from .errors import InvalidOption, nearest
from .flags import flag_of, hint

T = TypeVar("T")

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Attention = Literal["auto", "shared", "flat", "reference"]
LogLevel = Literal["debug", "info", "warning", "error"]
MetricsCompat = Literal["none", "vllm"]
TruncationChoice = Literal["disabled", "auto"]
PolicyName = Literal["lookahead", "lru", "fifo"]
CodecName = Literal["none", "fp8", "int8"]
Quantization = Literal["none", "fp8"]
KVDType = Literal["auto", "fp8"]

REMOTES = ("redis", "rediss", "unix", "file")
ENVIRONMENT_PREFIX = "PANDO_"
NO_OPTIONS = ("PANDO_HOME", "PANDO_BENCH_DATA", "PANDO_MAKE_PROMPT")  # variables that other parts read, and make
OF_A_CLUSTER = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP)")  # what Kubernetes sets for a service that is called pando
ROWS, ROWS_ON_A_GPU = 64, 256  # that run at the same time, if nothing is said
AUTO = "auto"  # how None is written in a file, in the environment and on the command line
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}  # seconds
SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _option(
    default: T,
    doc: str,
    at_least: int | None = None,
    at_most: int | None = None,
    *,
    if_empty: str | None = None,
    secret: bool = False,
    word: str | None = None,
    time: bool = False,
) -> T:
    """`if_empty`: what to do instead of giving an empty text, which is refused. `word`: what `--help` calls the value. `time`: seconds, for
    which 30m, 12h or 7d may be written."""
    facts = {"doc": doc, "at_least": at_least, "at_most": at_most, "if_empty": if_empty, "secret": secret, "word": word, "time": time}
    return field(default=default, repr=not secret, metadata=facts)


@dataclass(frozen=True)
class EngineConfig:
    model: str = _option(
        "smollm2-135m",
        "a directory in Hugging Face format, a GGUF file, a Hugging Face repository id, or a catalogue name",
        if_empty="name a directory, a GGUF file, a repository id or a catalogue name (`pando pull --list`)",
    )
    device: Device = _option("auto", "where the model runs; auto uses a GPU if there is one")
    dtype: DType = _option("auto", "the type of weights and cache; auto takes bfloat16 where the device multiplies it natively")
    quantization: Quantization = _option(
        "none", "fp8 holds the linear maps of the layers in 8 bits, and multiplies in 8 bits on GPUs that can; answers differ a little"
    )
    kv_dtype: KVDType = _option("auto", "the type of the KV cache: auto is the same as dtype; fp8 takes 8 bits, and rounds")
    max_model_len: int | None = _option(
        None, "tokens one request may have, prompt and answer together; auto: what the model was made for", 1, 2**31 - 1
    )
    max_num_seqs: int | None = _option(None, "rows that run at the same time; further requests wait; auto: 64, or 256 on a GPU", 1, 2**16)
    max_num_batched_tokens: int = _option(512, "tokens one step computes over all rows; a longer prompt takes several steps", 1, 2**20)
    page_size: int = _option(64, "token slots in a page of the KV cache", 1, 2**12)
    kv_cache_tokens: int | None = _option(None, "token slots in the KV cache; auto: chosen from the free memory", 1, 2**40)
    gpu_memory_utilization: float = _option(
        0.85, "the KV cache's share of the GPU memory that is left after the weights; the rest is for the steps", 0, 1
    )
    prefix_caching: bool = _option(True, "reuse the KV cache of prompts that begin alike; answers are the same without it")
    seed: int = _option(0, "the sampling seed for requests that have none of their own", 0, 2**63 - 1)
    threads: int | None = _option(None, "CPU threads; auto: one per core", 1, 2**12)
    attention: Attention = _option(
        "auto",
        "auto reads a context once for all rows that share it, where that pays; for comparison, shared always does so, flat never, and "
        "reference uses the slow definition",
    )
    native: bool = _option(True, "use Pando's compiled CPU kernels, which need a C compiler at the first start; --no-native uses torch's")
    cuda_graphs: bool = _option(True, "on a GPU, capture short steps as graphs, each a single launch; answers are the same without")
    overlap: bool | None = _option(None, "prepare the next step while the current one runs; auto: on a GPU; answers are the same without")
    cache_salt: str = _option("", "part of every cache key: requests under different salts never share cached context")
    host_gib: float | None = _option(
        None, "GiB of host memory that cached context may take beside a GPU; auto: a quarter of what is free, at most 16", 0, 2**20
    )
    disk_gib: float | None = _option(
        None,
        "GiB of disk for cached context, which then outlives the process; 0: none; auto: a tenth of what is free, up to 32",
        0,
        2**20,
    )
    disk_dir: str | None = _option(
        None, "the directory for --disk-gib; auto: `store` in Pando's cache folder", if_empty="name a directory", word="DIR"
    )
    remote: str | None = _option(
        None,
        "another tier, which several machines share: redis://host:port/0, or a directory",
        if_empty="write redis://host:port/0 or a directory, or leave the option out",
        word="URL",
    )
    ttl: int | None = _option(
        7 * 86400,
        "seconds, or for example 7d, after which unused context is removed from the tiers below the device; 0: never",
        0,
        2**31 - 1,
        time=True,
    )
    policy: PolicyName = _option("lookahead", "what leaves a tier first: lookahead goes by the waiting requests, lru and fifo by age")
    store_codec: CodecName = _option(
        "none", "how context is kept below the device: none keeps it as it is; fp8 and int8 take less room, and round"
    )

    def rows_on(self, device: str) -> int:
        """So many more on a GPU because its steps take hardly longer with them."""
        return self.max_num_seqs or (ROWS if device == "cpu" else ROWS_ON_A_GPU)

    def __post_init__(self) -> None:
        _check_all(self)
        if self.kv_dtype == "fp8" and self.store_codec != "none":
            raise InvalidOption(
                f"kv_dtype is fp8 and store_codec is {self.store_codec}: 8 bits would be rounded again, and take no less room; "
                "leave one of the two out"
            )
        kind, separator, _ = (self.remote or "").partition("://")
        if separator and kind not in REMOTES:
            raise InvalidOption(f"remote is of the kind {kind!r}; write redis://HOST:6379/0, file:///PATH, or the path of a directory")
        if separator and not _has_good_port(self.remote or ""):
            raise InvalidOption("remote has no good port; write redis://HOST:6379/0")  # not the whole of it: it may have a password
        if self.kv_cache_tokens is not None and self.kv_cache_tokens < self.page_size:
            raise InvalidOption(
                f"kv_cache_tokens is {self.kv_cache_tokens}, less than one page of {self.page_size} tokens; "
                f"raise it to at least {self.page_size} or lower page_size"
            )


@dataclass(frozen=True)
class ServerConfig:
    host: str = _option(
        "127.0.0.1",
        "the address to listen on; 0.0.0.0 lets other machines in, and should come with an --api-key",
        if_empty="write 127.0.0.1 for this machine alone, or 0.0.0.0 for every network it is in",
    )
    port: int = _option(8000, "the port to listen on; 0 takes a free one", 0, 2**16 - 1)
    served_model_name: str | None = _option(
        None, "what clients call the model; auto: the model as it was given", if_empty="name the model, or leave the option out"
    )
    api_key: tuple[str, ...] = _option(
        (),
        "a key that clients must send; may be given several times, and each is a tenant with its own cache; "
        "better given as PANDO_API_KEY, since other users of the machine may see a command line",
        if_empty="an empty key lets nobody in; give one, or leave the option out to let everybody in",
        secret=True,
        word="KEY",
    )
    chat_template: str | None = _option(
        None, "a Jinja file that turns messages into a prompt; auto: the model's own", if_empty="name a file", word="FILE"
    )
    share_prefix: tuple[str, ...] = _option(
        (),
        "a text file with the beginning of prompts that all tenants may share; may be given several times",
        if_empty="name a file",
        word="FILE",
    )
    schema: tuple[str, ...] = _option(
        (),
        "a PML file whose schema all tenants may use; its src names files below its directory; may be given several times",
        if_empty="name a file",
        word="FILE",
    )
    schema_dir: str | None = _option(
        None, "a directory whose *.pml files are registered in the same way", if_empty="name a directory", word="DIR"
    )
    eager_schemas: bool = _option(False, "encode these schemas at the start, for every API key, and not only when they are first used")
    truncation: TruncationChoice = _option(
        "disabled",
        "what happens to a prompt that does not fit, if no request of its session says: disabled refuses it, auto drops its oldest part",
    )
    pin_quota: int = _option(25, "percent of the KV cache that pins may hold", 0, 100)
    max_queue: int = _option(256, "rows that may wait beside those that run; further requests are answered with 429", 0, 2**20)
    request_timeout: int = _option(600, "seconds, or for example 10m, after which a request is given up", 1, 7 * 86400, time=True)
    drain_timeout: int = _option(30, "seconds, or for example 5m, that running requests have to finish after SIGTERM", 0, 86400, time=True)
    max_body_mib: int = _option(8, "MiB that the body of a request may have; larger ones are answered with 413", 1, 1024)
    cors_origins: tuple[str, ...] = _option(
        (),
        "an origin whose web pages may call the server, such as https://example.org, or *; may be given several times",
        if_empty="write an origin such as https://example.org, or *",
        word="ORIGIN",
    )
    metrics_compat: MetricsCompat = _option("none", "vllm adds, under vLLM's names, the metrics that routers read")
    log_level: LogLevel = _option("info", "the least important kind of message that is logged")
    disable_log_requests: bool = _option(False, "do not log a line for each request")
    log_prompts: bool = _option(False, "log the text of prompts and answers, which is left out otherwise")

    def __post_init__(self) -> None:
        _check_all(self)
        if any(re.fullmatch("[!-~]+", key) is None for key in self.api_key):
            raise InvalidOption("an api_key has a space or a character beyond ASCII, which no client can send; use other characters")
        for origin in self.cors_origins:
            if origin != "*" and re.fullmatch(r"https?://[^\s/]+", origin) is None:
                raise InvalidOption(f"cors_origins has {origin!r}; write scheme and host without a path, such as https://example.org, or *")


def options(of: type[EngineConfig] | type[ServerConfig] = EngineConfig) -> "tuple[Field[object], ...]":
    return fields(of)


def choices(option: "Field[object]") -> tuple[str, ...]:
    """The words an option takes, or none where it takes anything of its type."""
    return get_args(option.type) if get_origin(option.type) is Literal else ()


def kinds(option: "Field[object]") -> tuple[type, ...]:
    """The Python types of an option: (int, NoneType) for `int | None`; a choice of words is a str."""
    kind, origin = option.type, get_origin(option.type)
    if origin is Literal:
        return (str,)
    if origin in (Union, types.UnionType):
        return get_args(kind)
    return (origin or kind,)  # type: ignore[return-value]  # annotations in this file are types, never text


def load(cli: Mapping[str, object], environ: Mapping[str, str], file: Path | None) -> EngineConfig:
    """The configuration of this process. A None in `cli` is an option that was not given."""
    return EngineConfig(**_values(options(), cli, environ, file))  # type: ignore[arg-type]  # each value was checked against its field


def load_server(cli: Mapping[str, object], environ: Mapping[str, str], file: Path | None) -> tuple[EngineConfig, ServerConfig]:
    """The same for a server: one file, one environment and one command line hold the options of both."""
    values = _values((*options(), *options(ServerConfig)), cli, environ, file)
    engine = {option.name: values.pop(option.name) for option in options() if option.name in values}
    return EngineConfig(**engine), ServerConfig(**values)  # type: ignore[arg-type]


def misspelt(environ: Mapping[str, str]) -> list[str]:
    """A line for each variable that looks like an option and is none: it would be ignored, and nobody would know."""
    known, lines = [option.name.upper() for option in (*options(), *options(ServerConfig))], []
    for name in sorted(environ):
        is_set_by_a_cluster = OF_A_CLUSTER.search(name) or environ[name].startswith(("tcp://", "udp://"))
        asked = name.removeprefix(ENVIRONMENT_PREFIX)
        if asked != name and asked not in known and name not in NO_OPTIONS and not is_set_by_a_cluster:
            close = nearest(asked, known)
            meant = f"; did you mean {ENVIRONMENT_PREFIX}{close}?" if close else ""
            lines.append(f"the environment variable {name} is not an option, and is ignored{meant}")
    return lines


def check_names(given: Iterable[str]) -> None:
    """Refuses options of the engine that there are not, as Python code gives them."""
    known = [option.name for option in options()]
    for name in given:
        if name not in known:
            raise InvalidOption(f"unknown option {name!r}; {hint(name, known)}")


def _values(
    wanted: "tuple[Field[object], ...]", cli: Mapping[str, object], environ: Mapping[str, str], file: Path | None
) -> dict[str, object]:
    """What the sources say of the wanted options. A file may serve several commands: options that only others want are checked alone."""
    in_file = {option.name: option for option in (*options(), *options(ServerConfig))}
    known = {option.name: option for option in wanted}
    values: dict[str, object] = {}
    for key, value in _read(file).items() if file else ():
        if key not in in_file:
            if isinstance(value, dict):
                told = "write options at the top of the file, without a [section]"
            else:
                told = hint(key.lower().replace("-", "_"), list(in_file)).replace("=False", " = false").replace('="', ' = "')
            raise InvalidOption(f"{file}: unknown option {key!r}; {told}")
        taken = _take(in_file[key], value, str(file))
        if key in known:
            values[key] = taken
    for key, option in known.items():
        variable = ENVIRONMENT_PREFIX + key.upper()
        if variable in environ:
            values[key] = _take(option, _parse(option, environ[variable], variable), variable)
        given = cli.get(key)
        if given is not None:
            flag = "MODEL" if key == "model" else flag_of(key)
            values[key] = _take(option, _parse(option, given, flag) if isinstance(given, str) else given, flag)
    if unknown := set(cli) - set(known):
        raise InvalidOption(f"unknown option {sorted(unknown)[0]!r}; known are {', '.join(known)}")
    return values


def _read(file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InvalidOption(f"{file}: cannot be read ({error.strerror}); give --config a TOML file") from error
    except ValueError as error:  # malformed TOML and malformed UTF-8 alike
        raise InvalidOption(f"{file}: not valid TOML ({error}); write lines such as max_num_seqs = 8") from error


def _take(option: "Field[object]", value: object, source: str) -> object:
    if isinstance(value, list) and tuple in kinds(option):
        value = tuple(value)
    value = _meant(option, value)
    try:
        _check(option, value)
    except InvalidOption as error:
        raise InvalidOption(f"{source}: {error}") from None
    return value


def _meant(option: "Field[object]", value: object) -> object:
    """Of what is written in words, everywhere alike."""
    if value == AUTO and type(None) in kinds(option):
        return None
    if option.metadata["time"] and isinstance(value, str) and (found := re.fullmatch("([0-9]{1,9})([smhdw])", value)):
        return int(found[1]) * UNITS[found[2]]
    return value


def _parse(option: "Field[object]", text: str, source: str) -> object:
    """Text from the environment or the command line as a value of the option's type."""
    if tuple in kinds(option):
        return tuple(part.strip() for part in text.split(","))
    if text == AUTO or str in kinds(option):
        return text
    if bool in kinds(option):
        if text.lower() not in SWITCH:
            raise InvalidOption(f"{source}: {option.name} is {text!r}; write one of {', '.join(SWITCH)}")
        return SWITCH[text.lower()]
    try:
        return float(text) if float in kinds(option) else int(text)
    except ValueError:
        return text  # the check of its type names what is expected


def _has_good_port(url: str) -> bool:
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


def _check_all(config: EngineConfig | ServerConfig) -> None:
    for option in options(type(config)):
        object.__setattr__(config, option.name, _meant(option, getattr(config, option.name)))
        _check(option, getattr(config, option.name))


def _check(option: "Field[object]", value: object) -> None:
    shown = "of a wrong kind" if option.metadata["secret"] else repr(value)
    low, high = option.metadata["at_least"], option.metadata["at_most"]
    parts = value if isinstance(value, tuple) else (value,)
    if (
        type(value) not in (*kinds(option), *((int,) if float in kinds(option) else ()))
        or (isinstance(value, tuple) and set(map(type, value)) - {str})
        or (isinstance(value, int | float) and low is not None and not low <= value <= high)
    ):
        raise InvalidOption(f"{option.name} is {shown}; it must be {_expected(option)}")
    if (words := choices(option)) and value not in words:
        raise InvalidOption(f"{option.name} is {shown}; it must be one of {', '.join(words)}")
    if option.metadata["if_empty"] and "" in parts:
        raise InvalidOption(f"{option.name} is empty; {option.metadata['if_empty']}")


def _expected(option: "Field[object]") -> str:
    or_auto = ", or auto" if type(None) in kinds(option) else ""
    if bool in kinds(option):
        return "true or false" + or_auto
    if tuple in kinds(option):
        return "a list of texts"
    if not {int, float} & set(kinds(option)):
        return "text" + or_auto
    number = "number" if float in kinds(option) else "whole number"
    unit, or_time = (" of seconds", ", or for example 12h") if option.metadata["time"] else ("", "")
    return f"a {number}{unit} from {option.metadata['at_least']} to {option.metadata['at_most']}{or_time}{or_auto}"
