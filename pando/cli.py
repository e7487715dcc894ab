"""The command line: arguments in, one call out."""

import argparse
import errno
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .chat import chat, utf8
from .config import EngineConfig, Parser, ServerConfig, choices, kinds, load, load_server, options
from .engine.request import FinishReason, RequestOutput, SamplingParams
from .errors import BadModelFile, InvalidOption, InvalidPrompt, PandoError

if TYPE_CHECKING:
    from dataclasses import Field

    from .engine.llm import LLM

EXIT_INPUT, EXIT_INTERRUPT, EXIT_PIPE = 2, 130, 141
MAX_TOKENS = 512
EXTRAS = {"serve": "[serve]", "bench": "[bench,serve]"}  # what a command needs beyond the plain package


def main(argv: Sequence[str] | None = None) -> int:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started this process
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # open as long as the process runs
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # an answer may hold what this terminal cannot show
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except PandoError as error:
        print(f"pando: error: {error}", file=sys.stderr)
        return EXIT_INPUT
    except ModuleNotFoundError as error:
        if not error.name or error.name.split(".")[0] == __package__:
            raise
        install = f"pip install 'pando-llm{EXTRAS.get(words[0], '')}'"
        fix = f"install it with `{install}`, or in a checkout with `make dev`"
        print(f"pando: error: the package {error.name} is missing here; {fix}", file=sys.stderr)
        return EXIT_INPUT
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPT
    except BrokenPipeError:
        _discard_output()
        return EXIT_PIPE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _discard_output()
        print(f"pando: error: no space left to write {error.filename or 'the output'}; free some, or write elsewhere", file=sys.stderr)
        return EXIT_INPUT


def _discard_output() -> None:
    """Python flushes stdout once more at exit, though nobody takes it: give it somewhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_llm(config: EngineConfig) -> "LLM":
    from .engine.llm import LLM

    return LLM.from_config(config)


def _dispatch(argv: list[str]) -> int:
    if argv[:1] == ["bench"]:  # the benchmarks read their own arguments
        return _bench(argv[1:])
    arguments = parse(argv)
    if arguments.command == "serve":
        return _serve(arguments)
    if arguments.command == "version":
        print(f"pando {__version__}")
    elif arguments.command == "pull":
        _pull(arguments)
    elif arguments.command == "run":
        _run(arguments)
    else:
        _chat(arguments)
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    wanted = (*options(), *options(ServerConfig))
    engine, server = load_server(_given(arguments, wanted), os.environ, arguments.config)
    from .server.serve import serve

    return serve(engine, server)


def _bench(argv: list[str]) -> int:
    match argv[:1]:
        case ["serve"]:
            from .bench.serve import main as serve

            return serve(argv[1:])
        case ["overhead"]:
            from .bench.overhead import main as overhead

            return overhead(argv[1:])
        case ["soak"]:
            from .bench.soak import main as soak

            return soak(argv[1:])
        case ["attention"]:
            from .bench.attention.command import main as attention

            return attention(argv[1:])
    from .bench.foundation import main as foundation

    return foundation(argv)


def _chat(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    sampling = _sampling(arguments, config)
    chat(make_llm(config), config.model, sampling, utf8(arguments.system or ""))


def _run(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    sampling = _sampling(arguments, config)
    prompt = utf8(arguments.prompt if arguments.prompt != "-" else sys.stdin.buffer.read())
    if arguments.raw and arguments.system is not None:
        raise InvalidOption("--system is part of a chat template, and --raw uses none; give one of the two")
    if not (prompt if arguments.raw else prompt.strip()):
        raise InvalidPrompt("the prompt is empty; give it as an argument, or - and the text on standard input")
    system = [{"role": "system", "content": utf8(arguments.system)}] if arguments.system else []
    messages = [*system, {"role": "user", "content": prompt}]
    llm = make_llm(config)
    if sampling.n == 1 and not arguments.json:
        for event in llm.stream(prompt, sampling) if arguments.raw else llm.stream_chat(messages, sampling):
            print(event.text, end="", flush=True)
            _check(event.finish_reason)
        print()
        return
    [output] = llm.generate([prompt], sampling) if arguments.raw else llm.chat(messages, sampling)
    if arguments.json:
        print(json.dumps(_as_json(output, config.model), ensure_ascii=False))
        return
    for answer in output.outputs:
        _check(answer.finish_reason)
        print(f"--- {answer.index + 1} of {len(output.outputs)}\n{answer.text}")


def _check(finish_reason: FinishReason | None) -> None:
    if finish_reason == "error":
        raise BadModelFile("the model computed values that are not numbers; try --dtype float32, or fetch the model again")


def _pull(arguments: argparse.Namespace) -> None:
    from .model.hub import catalogue, resolve

    if arguments.list:
        for entry in catalogue():
            print(f"{entry.name}  {entry.size >> 20} MiB  {entry.description}")
        return
    print(resolve(_config(arguments).model).directory)


def _as_json(output: RequestOutput, model: str) -> dict[str, object]:
    answers = [
        {"index": a.index, "text": a.text, "token_ids": a.token_ids, "finish_reason": a.finish_reason, "stop_reason": a.stop_reason}
        for a in output.outputs
    ]
    prompt_tokens = len(output.prompt_token_ids)
    return {"model": model, "num_prompt_tokens": prompt_tokens, "num_cached_tokens": output.num_cached_tokens, "outputs": answers}


def _config(arguments: argparse.Namespace) -> EngineConfig:
    return load(_given(arguments, options()), os.environ, arguments.config)


def _given(arguments: argparse.Namespace, wanted: "tuple[Field[object], ...]") -> dict[str, object]:
    return {option.name: getattr(arguments, option.name, None) for option in wanted}


def _sampling(arguments: argparse.Namespace, config: EngineConfig) -> SamplingParams:
    return SamplingParams(
        n=getattr(arguments, "n", 1),
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        seed=config.seed if arguments.seed is not None else None,
        stop=arguments.stop,
        max_tokens=arguments.max_tokens,
    )


def parse(argv: list[str]) -> argparse.Namespace:
    arguments, late = parser().parse_known_args(argv)
    if late and arguments.command == "run" and arguments.model is None and len(late) == 1 and not late[0].startswith("-"):
        # argparse has taken the model for the prompt, because options stood between the two
        arguments.model, arguments.prompt = arguments.prompt, late[0]
    elif late:
        raise InvalidOption(f"unknown argument {late[0].split('=')[0]!r}; see `pando {arguments.command} --help`")
    return arguments


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

    about = "Talk to a model; over a pipe, every line is a turn."
    chat = commands.add_parser("chat", help="talk to a model", description=about, allow_abbrev=False)
    _add_model(chat)
    _add_config(chat)
    _add_sampling(chat)
    _add_engine(chat)

    about = "Answer one prompt and print the answer as it comes."
    run = commands.add_parser("run", help="answer one prompt", description=about, allow_abbrev=False)
    _add_model(run)
    run.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from standard input")
    run.add_argument("--raw", action="store_true", help="give the prompt to the model as it is, without its chat template")
    run.add_argument("--json", action="store_true", help="print one JSON object with the answer, its tokens and what was cached")
    run.add_argument("--n", type=int, default=1, metavar="N", help="answers to the same prompt (1); they share its cache")
    _add_config(run)
    _add_sampling(run)
    _add_engine(run)

    about = "Fetch a model, so that later starts need no network."
    pull = commands.add_parser("pull", help="fetch a model", description=about, allow_abbrev=False)
    _add_model(pull)
    pull.add_argument("--list", action="store_true", help="list the catalogue instead")
    _add_config(pull)

    commands.add_parser(
        "bench",
        help="measure Pando beside transformers; `attention`, `serve`, `overhead` or `soak` behind it measure its parts, or any server",
        add_help=False,
    )
    commands.add_parser("version", help="print the version")
    return top


def _add_model(to: argparse.ArgumentParser) -> None:
    model = next(option for option in options() if option.name == "model")
    to.add_argument("model", nargs="?", metavar="MODEL", help=f"{model.metadata['doc']} ({model.default})")


def _add_config(to: argparse.ArgumentParser) -> None:
    to.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of options, such as pando.toml")


def _add_sampling(to: argparse.ArgumentParser) -> None:
    group = to.add_argument_group("the answer")
    group.add_argument("--system", metavar="TEXT", help="the system prompt")
    group.add_argument("--max-tokens", type=int, default=MAX_TOKENS, metavar="N", help=f"tokens of one answer ({MAX_TOKENS})")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token, always the same (0)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample from the likeliest tokens that make up P (1)")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest tokens; 0: all (0)")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="drop tokens less likely than P times the likeliest (0)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before this text; may be given several times")


def _add_engine(to: argparse.ArgumentParser) -> None:
    about = "Each may also stand in the TOML file, or in the environment: PANDO_MAX_NUM_SEQS=8."
    _add_options(to.add_argument_group("the engine", about), options())


def _add_server(to: argparse.ArgumentParser) -> None:
    about = "Each may also stand in the TOML file, or in the environment, several values separated by commas: PANDO_API_KEY=one,two."
    _add_options(to.add_argument_group("the server", about), options(ServerConfig))


def _add_options(group: "argparse._ArgumentGroup", wanted: "tuple[Field[object], ...]") -> None:
    for option in wanted:
        if option.name == "model":
            continue  # the positional argument
        flag = "--" + option.name.replace("_", "-")
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
