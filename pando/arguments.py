"""What may stand on the command line."""

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .config import EngineConfig, ServerConfig, choices, kinds, options
from .errors import InvalidOption
from .flags import ELSEWHERE, Parser, flag_of

if TYPE_CHECKING:
    from dataclasses import Field

MAX_TOKENS = 512


def parse(argv: list[str]) -> argparse.Namespace:
    if "-hf" in argv and "--" not in argv:  # argparse would take it for -h
        raise InvalidOption(f"unknown argument '-hf'; {ELSEWHERE['-hf']}")
    arguments = argparse.Namespace()
    late = parser().parse_known_args(argv, arguments)[1]
    if arguments.command == "run":
        late = _take_words(arguments, late)
    if late:
        flag = late[0].split("=")[0]
        if flag in ELSEWHERE:
            raise InvalidOption(f"unknown argument {flag!r}; {ELSEWHERE[flag]}")
        arguments.parser.error(f"unknown argument {flag!r}")
    return arguments


def _take_words(arguments: argparse.Namespace, late: list[str]) -> list[str]:
    """Which word is the model and which the prompt, wherever options stand between them: argparse does not know. What is left over."""
    if late and late[0].startswith("-") and late[0] != "-":
        return late
    words = [word for word in (arguments.model, arguments.prompt, *late) if word is not None]
    is_modular = arguments.schema is not None or arguments.prompt_file is not None
    if not words and not is_modular:
        raise InvalidOption("there is no prompt; give it as PROMPT, or - to read it from standard input; see `pando run --help`")
    prompts = 0 if is_modular else 1
    if prompts and len(words) == 1 and _is_model(words[0]):
        raise InvalidOption(f"{words[0]} is a model, and there is no prompt; give one after it, or - to read one from standard input")
    arguments.prompt = words[min(len(words), 1 + prompts) - 1] if prompts else None
    arguments.model = words[0] if len(words) > prompts else None
    return words[1 + prompts :]


def _is_model(word: str) -> bool:
    path = Path(word)
    return word == EngineConfig.model or (path.suffix == ".gguf" and path.is_file()) or (path / "config.json").is_file()


def parser() -> Parser:
    top = Parser(prog="pando", description="An LLM inference engine that never computes, stores or reads the same context twice.")
    top.add_argument("--version", action="version", version=f"pando {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    about = "Serve a model over HTTP to any OpenAI client. Each option shows its default in parentheses."
    serve = commands.add_parser("serve", help="serve a model to OpenAI clients", description=about, allow_abbrev=False)
    _add_model(serve)
    _add_config(serve)
    _add_server(serve)
    _add_engine(serve)

    about = "Talk to a model. When input comes from a pipe, every line is a turn."
    chat = commands.add_parser("chat", help="talk to a model", description=about, allow_abbrev=False)
    _add_model(chat)
    _add_config(chat)
    _add_sampling(chat)
    _add_engine(chat)

    about = "Answer one prompt and print the answer as it comes."
    run = commands.add_parser("run", help="answer one prompt", description=about, allow_abbrev=False)
    _add_model(run)
    run.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; - reads it from standard input")
    run.add_argument("--schema", type=Path, metavar="FILE", help="a schema in PML, with --prompt in place of PROMPT")
    run.add_argument("--prompt", type=Path, dest="prompt_file", metavar="FILE", help="a prompt in PML, made from it; - is standard input")
    run.add_argument("--eager", action="store_true", help="encode all modules of the schema first, and not only those in the prompt")
    run.add_argument("--repair", type=float, metavar="R", help="the share of module tokens to compute again, from 0 to 1 (0)")
    run.add_argument("--stats", action="store_true", help="print on standard error what was reused and how long it took")
    run.add_argument("--raw", action="store_true", help="give the prompt to the model as it is, without the chat template")
    run.add_argument("--json", action="store_true", help="print one JSON object with the answer, its tokens and what was cached")
    run.add_argument("--n", type=int, default=1, metavar="N", help="answers to the same prompt (1); they share its cache")
    run.add_argument(
        "--truncation",
        choices=("auto", "disabled"),
        default="disabled",
        help="for a prompt that does not fit: auto drops its oldest part, disabled refuses it (disabled)",
    )
    _add_config(run)
    _add_sampling(run)
    _add_engine(run)

    about = "Download a model, so that later starts need no network."
    pull = commands.add_parser("pull", help="download a model", description=about, allow_abbrev=False)
    _add_model(pull)
    pull.add_argument("--list", action="store_true", help="list the catalogue instead")
    _add_config(pull)

    _add_schema(commands.add_parser("schema", help="check or show a schema in PML, or measure its answers", allow_abbrev=False))

    _add_cache(commands.add_parser("cache", help="list, check, pin or remove what is kept on disk", allow_abbrev=False))

    commands.add_parser(
        "bench",
        help="measure Pando beside transformers, or parts of Pando; `pando bench --help` lists them",
        add_help=False,
    )
    commands.add_parser("version", help="print the version")
    return top


def _add_schema(to: argparse.ArgumentParser) -> None:
    actions = to.add_subparsers(dest="action", metavar="ACTION", required=True)
    abouts = {
        "check": "Check a schema for errors; with a prompt, show at which position each of its runs stands and which are computed.",
        "show": "List the modules of a schema: tokens, bytes of KV cache, unions, params.",
    }
    used = {"check": ("max_model_len",), "show": ("max_model_len", "page_size", "device", "dtype", "kv_dtype")}
    for name, about in abouts.items():
        action = actions.add_parser(name, help=about, description=about, allow_abbrev=False)
        action.add_argument("file", type=Path, metavar="FILE", help="a schema in PML; its src names files below its directory")
        if name == "check":
            action.add_argument(
                "--prompt", type=Path, dest="prompt_file", metavar="FILE", help="a prompt in PML, made from it; - is standard input"
            )
        model = next(option for option in options() if option.name == "model")
        action.add_argument("--model", metavar="MODEL", help=f"the model whose tokenizer is used ({model.default})")
        _add_config(action)
        _add_engine(action, used[name])
    actions.add_parser("quality", help="compare modular answers with exact ones, on your own prompts", add_help=False)


def _add_cache(to: argparse.ArgumentParser) -> None:
    actions = to.add_subparsers(dest="action", metavar="ACTION", required=True)
    abouts = {
        "ls": "List the conversations that are kept, last used first.",
        "stat": "Show how much is kept, for which models and tenants.",
        "verify": "Read everything that is kept and compare it with its checksums; the exit code is 1 if something is bad.",
        "purge": "Remove what is kept. A running server computes it again when it is needed.",
        "pin": "Keep the conversations up to these pages, whatever their age; servers read pins when they start.",
        "unpin": "Remove such pins, so that the conversations may be removed like any other.",
    }
    added = {name: actions.add_parser(name, help=about, description=about, allow_abbrev=False) for name, about in abouts.items()}
    for action in added.values():
        action.add_argument("--disk-dir", metavar="DIR", help="the directory (`store` in Pando's cache folder)")
        action.add_argument("--remote", metavar="URL", help="work on a remote instead; on a Redis server, only stat and purge exist")
        action.add_argument("--json", action="store_true", help="print one JSON object")
        _add_config(action)
    added["ls"].add_argument("--pages", action="store_true", help="list every page instead")
    added["verify"].add_argument("--remove", action="store_true", help="remove what is bad")
    for name in ("pin", "unpin"):
        added[name].add_argument("keys", nargs="+", metavar="KEY", help="the beginning of a key, as `pando cache ls` shows it")
    purge = added["purge"]
    purge.add_argument("--tenant", metavar="SALT", help="remove what was kept under this cache_salt")
    purge.add_argument(
        "--api-key", metavar="KEY", help="remove what a server kept for this API key, without a salt or under that of --tenant"
    )
    purge.add_argument("--tag", metavar="TAG", help="remove what is kept for the tenant with this tag in `pando cache ls`")
    purge.add_argument("--older-than", metavar="AGE", help="remove what was not used for this long, such as 7d, and is not pinned")
    purge.add_argument("--all", action="store_true", help="remove everything")


def _add_model(to: argparse.ArgumentParser) -> None:
    model = next(option for option in options() if option.name == "model")
    to.add_argument("model", nargs="?", metavar="MODEL", help=f"{model.metadata['doc']} ({model.default})")


def _add_config(to: argparse.ArgumentParser) -> None:
    to.add_argument("--config", type=Path, metavar="FILE", help="a TOML file with options, such as pando.toml")


def _add_sampling(to: argparse.ArgumentParser) -> None:
    group = to.add_argument_group("the answer")
    group.add_argument("--system", metavar="TEXT", help="the system prompt")
    group.add_argument("--max-tokens", type=int, default=MAX_TOKENS, metavar="N", help=f"the most tokens an answer may have ({MAX_TOKENS})")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: always the likeliest token (0)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample from the likeliest tokens that add up to P (1)")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest tokens; 0: from all (0)")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="drop tokens less likely than P times the likeliest (0)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before this text; may be given several times")


def _add_engine(to: argparse.ArgumentParser, used: Collection[str] | None = None) -> None:
    """`used`: only these, of a command that starts no engine."""
    about = "Each may also be set in the TOML file, or in the environment: PANDO_MAX_MODEL_LEN=2048."
    wanted = tuple(option for option in options() if used is None or option.name in used)
    _add_options(to.add_argument_group("the engine", about), wanted)


def _add_server(to: argparse.ArgumentParser) -> None:
    about = "Each may also be set in the TOML file, or in the environment; commas separate several values: PANDO_API_KEY=one,two."
    _add_options(to.add_argument_group("the server", about), options(ServerConfig))


def _add_options(group: "argparse._ArgumentGroup", wanted: "tuple[Field[object], ...]") -> None:
    for option in wanted:
        if option.name == "model":
            continue  # the positional argument
        flag = flag_of(option.name)
        text = f"{option.metadata['doc']} ({_written(option.default)})"
        word = option.metadata["word"] or "|".join(choices(option)) or ("TEXT" if str in kinds(option) else "N")
        if bool in kinds(option):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif tuple in kinds(option):
            group.add_argument(flag, action="append", metavar=word, help=text)
        else:
            group.add_argument(flag, metavar=word, help=text)


def _written(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return {None: "auto", (): "none", "": "empty"}.get(default, str(default))  # type: ignore[call-overload, no-any-return]
