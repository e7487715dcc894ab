"""The command line: arguments in, one call out."""

import argparse
import errno
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from . import __version__
from .arguments import MAX_TOKENS, parse
from .chat import Speed, chat, utf8
from .config import EngineConfig, ServerConfig, load, load_server, misspelt, options
from .engine.request import FinishReason, RequestOutput, Reuse, SamplingParams, TokenEvent
from .errors import BadModelFile, InvalidOption, InvalidPrompt, MarkupError, PandoError, PoolTooSmall, PromptTooLong, counted, nearest

if TYPE_CHECKING:
    from dataclasses import Field

    from .engine.llm import LLM
    from .engine.schemas import Prompt

EXIT_INPUT, EXIT_INTERRUPT, EXIT_PIPE = 2, 130, 141
EXTRAS = {"serve": "[serve]", "bench": "[bench,serve]"}  # what a command needs beyond the plain package


def main(argv: Sequence[str] | None = None) -> int:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started this process
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # open as long as the process runs
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # an answer may hold what this terminal cannot show
    words = list(sys.argv[1:] if argv is None else argv)
    for line in misspelt(os.environ):
        print(f"pando: warning: {line}", file=sys.stderr)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except PandoError as error:
        told = error.shown() if isinstance(error, MarkupError) else str(error)
        print(f"pando: error: {told}", file=sys.stderr)
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
    if argv[:2] == ["schema", "quality"]:
        from .bench.quality import main as quality

        return quality(argv[2:])
    arguments = parse(argv)
    if arguments.command == "serve":
        return _serve(arguments)
    if arguments.command == "version":
        print(f"pando {__version__}")
    elif arguments.command == "pull":
        _pull(arguments)
    elif arguments.command == "run":
        _run(arguments)
    elif arguments.command == "schema":
        _schema(arguments)
    elif arguments.command == "cache":
        from .cache_cli import cache

        return cache(arguments, _config(arguments))
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
        case ["modules"]:
            from .bench.modules import main as modules

            return modules(argv[1:])
        case ["trace"]:
            from .bench.trace import main as trace

            return trace(argv[1:])
        case ["truncation"]:
            from .bench.truncation import main as truncation

            return truncation(argv[1:])
        case ["store"]:
            from .bench.store import main as store

            return store(argv[1:])
        case ["throughput"]:
            from .bench.throughput.command import main as throughput

            return throughput(argv[1:])
    if argv and not argv[0].startswith("-"):
        from .bench import PARTS

        close = nearest(argv[0], list(PARTS))
        hint = f"did you mean {close}? See" if close else f"those are {', '.join(PARTS)}; see"
        raise InvalidOption(f"there is no benchmark {argv[0]!r}; {hint} `pando bench --help`")
    from .bench.foundation import main as foundation

    return foundation(argv)


def _chat(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    sampling = _sampling(arguments, config)
    with closing(make_llm(config)) as llm:
        chat(llm, config.model, sampling, utf8(arguments.system or ""))


def _schema(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    from .schema_cli import check, show

    for line in check(config, arguments.file, arguments.prompt_file) if arguments.action == "check" else show(config, arguments.file):
        print(line)


def _run(arguments: argparse.Namespace) -> None:
    config = _config(arguments)
    sampling = _sampling(arguments, config)
    messages, files = ([], _files(arguments)) if arguments.schema or arguments.prompt_file else (_messages(arguments), None)
    with closing(make_llm(config)) as llm:
        prompt = _modular(arguments, llm, *files) if files else messages[-1]["content"] if arguments.raw else None
        try:
            _answer(arguments, llm, config.model, sampling, messages, prompt)
        except (PromptTooLong, PoolTooSmall) as error:  # whose advice is in Python's words
            raise type(error)(str(error).replace('truncation="auto"', "--truncation auto")) from error


def _answer(
    arguments: argparse.Namespace,
    llm: "LLM",
    model: str,
    sampling: SamplingParams,
    messages: list[dict[str, str]],
    prompt: "str | Prompt | None",
) -> None:
    how = {"truncation": arguments.truncation}
    if sampling.n == 1 and not arguments.json:
        events = llm.stream(prompt, sampling, **how) if prompt is not None else llm.stream_chat(messages, sampling, **how)
        _stream(events, arguments.stats, limited=arguments.max_tokens != MAX_TOKENS)
        return
    began = time.perf_counter()
    [output] = llm.generate([prompt], sampling, **how) if prompt is not None else llm.chat(messages, sampling, **how)
    took = time.perf_counter() - began
    _tell_reuse(output.reuse)
    if arguments.stats:
        _tell_speed(
            f"{counted(len(output.prompt_token_ids), 'prompt token')}, {output.num_cached_tokens} cached · {took:.2f} s", output.reuse
        )
    if arguments.json:
        print(json.dumps(_as_json(output, model), ensure_ascii=False))
        return
    for answer in output.outputs:
        _check(answer.finish_reason)
        print(f"--- {answer.index + 1} of {len(output.outputs)}\n{answer.text}")


def _messages(arguments: argparse.Namespace) -> list[dict[str, str]]:
    prompt = utf8(arguments.prompt if arguments.prompt != "-" else sys.stdin.buffer.read())
    if arguments.raw and arguments.system is not None:
        raise InvalidOption("--system needs a chat template, and --raw uses none; give only one of the two")
    if arguments.eager or arguments.repair is not None:
        raise InvalidOption("--eager and --repair need a --schema with modules, and none is given; leave them out")
    if not (prompt if arguments.raw else prompt.strip()):
        raise InvalidPrompt("the prompt is empty; give it as an argument, or give - and write the text to standard input")
    system = [{"role": "system", "content": utf8(arguments.system)}] if arguments.system else []
    return [*system, {"role": "user", "content": prompt}]


def _files(arguments: argparse.Namespace) -> tuple[bytes, str]:
    """A schema and a prompt, before a model is loaded for them."""
    if arguments.schema is None or arguments.prompt_file is None:
        raise InvalidOption("--schema and --prompt belong together, since a prompt in PML is made from a schema; give both")
    if arguments.raw or arguments.system is not None:
        raise InvalidOption("--raw and --system are for plain prompts, and this one is in PML; write its beginning into the schema")
    if arguments.truncation == "auto":
        raise InvalidOption("--truncation auto is for plain prompts, and nothing of a prompt in PML is ever dropped; leave it out")
    from .schema_cli import read_pml, read_prompt

    return read_pml(arguments.schema), utf8(read_prompt(arguments.prompt_file))


def _modular(arguments: argparse.Namespace, llm: "LLM", schema: bytes, prompt: str) -> "Prompt":
    from .engine.schemas import Prompt
    from .schema_cli import advice

    start = time.perf_counter()
    folder = arguments.schema.parent
    llm.schemas.add(schema, file=str(arguments.schema), directory=folder, eager=arguments.eager, repair=arguments.repair)
    if arguments.eager and arguments.stats:
        print(f"schema encoded in {time.perf_counter() - start:.2f} s", file=sys.stderr)
    for line in advice(llm.schemas.library.bind(prompt, file=str(arguments.prompt_file))[1], llm.tokenizer):
        print(line, file=sys.stderr)
    return Prompt(prompt, file=str(arguments.prompt_file))


def _stream(events: Iterator[TokenEvent], stats: bool, *, limited: bool) -> None:
    """`limited`: whoever asks knows how long the answer may be."""
    speed, reuse, cut = Speed(time.perf_counter()), Reuse(), False
    for event in events:
        speed.add(event, time.perf_counter())
        reuse = event.reuse
        print(event.text, end="", flush=True)
        _check(event.finish_reason)
        cut = event.finish_reason == "length" and not limited
    print()
    if cut:
        print("the answer was cut off at the token limit; raise --max-tokens for a longer one", file=sys.stderr)
    _tell_reuse(reuse)
    if stats:
        _tell_speed(str(speed), reuse)


def _tell_speed(speed: str, reuse: Reuse) -> None:
    repaired = f" · {reuse.repaired} module tokens were repaired" if reuse.repaired else ""
    print(f"{speed}{repaired}", file=sys.stderr)


def _tell_reuse(reuse: Reuse) -> None:
    """What was not answered exactly is said to everybody, and on standard error, where no answer stands."""
    if reuse.truncated is not None:
        print(f"the prompt did not fit, so {reuse.truncated.dropped} of its tokens were dropped", file=sys.stderr)
    why = {
        "truncated": "the tokens that were kept had been computed behind those",
        "modular": f"{counted(reuse.modules, 'module token')} had been encoded in another context",
        "rounded": "some of what was reused had been kept with a codec that rounds",
        "exact": "",
    }[reuse.how]
    if why:
        print(f"the answer is approximate: {why}", file=sys.stderr)


def _check(finish_reason: FinishReason | None) -> None:
    if finish_reason == "error":
        raise BadModelFile("the model computed values that are not numbers; try --dtype float32, or download the model again")


def _pull(arguments: argparse.Namespace) -> None:
    from .model.hub import CATALOGUE, resolve

    if arguments.list:
        for entry in CATALOGUE:
            print(f"{entry.name}  {entry.size >> 20} MiB  {entry.description}")
        return
    print(resolve(_config(arguments).model).directory)


def _as_json(output: RequestOutput, model: str) -> dict[str, object]:
    answers = [
        {"index": a.index, "text": a.text, "token_ids": a.token_ids, "finish_reason": a.finish_reason, "stop_reason": a.stop_reason}
        for a in output.outputs
    ]
    prompt_tokens = len(output.prompt_token_ids)
    reuse = output.reuse
    dropped = reuse.truncated.dropped if reuse.truncated is not None else 0
    return {
        "model": model,
        "num_prompt_tokens": prompt_tokens,
        "num_cached_tokens": output.num_cached_tokens,
        "num_dropped_tokens": dropped,
        "reuse": reuse.how if output.num_cached_tokens or reuse.how != "exact" else "none",
        "tokens": reuse.sources(prompt_tokens - dropped),
        "repaired": reuse.repaired,
        "outputs": answers,
    }


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
        seed=config.seed if arguments.seed is not None or config.seed != EngineConfig.seed else None,  # wherever it was said
        stop=arguments.stop,
        max_tokens=arguments.max_tokens,
    )
