"""The command line, the conversation and the configuration, with an engine that only pretends."""

import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
import types
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest

import pando
from pando import arguments, chat, cli
from pando.bench import PARTS
from pando.config import EngineConfig, ServerConfig, load
from pando.engine.request import CompletionOutput, RequestOutput, Reuse, SamplingParams, TokenEvent, Truncated
from pando.errors import InvalidOption, InvalidPrompt, PromptTooLong
from pando.server.service import Busy

from .tiny import tiny_llm

ROOT = Path(pando.__file__).parent.parent


@dataclass
class FakeLLM:
    """Answers every prompt with the same words, and remembers what it was asked."""

    words: tuple[str, ...] = ("Par", "is", ".")
    asked: list = field(default_factory=list)
    sampled: list[SamplingParams] = field(default_factory=list)
    interrupt_at: int | None = None  # Ctrl-C arrives while this word is made
    limit: int = 10_000  # characters of a prompt
    finish: str = "stop"
    closed: int = 0
    truncations: list[str] = field(default_factory=list)
    reuse: Reuse = field(default_factory=lambda: Reuse(30))  # of every prompt

    def stream(self, prompt, sampling_params=None, *, truncation="disabled"):
        self.truncations.append(truncation)
        self.asked.append(prompt)
        self.sampled.append(sampling_params)
        try:
            if len(str(prompt)) > self.limit:
                raise PromptTooLong(f"the prompt has {len(str(prompt))} tokens and the context holds {self.limit}; shorten it")
            for i, word in enumerate(self.words):
                if i == self.interrupt_at:
                    signal.raise_signal(signal.SIGINT)
                last = i == len(self.words) - 1
                end = self.finish if last else None
                yield TokenEvent("0", 0, i, word, finish_reason=end, num_prompt_tokens=42, num_cached_tokens=30, reuse=self.reuse)
        finally:
            self.closed += 1

    def stream_chat(self, messages, sampling_params=None, *, truncation="disabled"):
        return self.stream([dict(message) for message in messages], sampling_params, truncation=truncation)

    def generate(self, prompts, sampling_params=None, *, truncation="disabled"):
        self.truncations.append(truncation)
        self.asked += prompts
        self.sampled.append(sampling_params)
        outputs = [CompletionOutput(i, "".join(self.words), [1, 2, 3], finish_reason="stop") for i in range(sampling_params.n)]
        return [RequestOutput("0", None, [7] * 42, outputs, num_cached_tokens=30, reuse=self.reuse, finished=True)]

    def chat(self, messages, sampling_params=None, *, truncation="disabled"):
        return self.generate([messages], sampling_params, truncation=truncation)

    def close(self):
        self.closed = True


@pytest.fixture
def llm(monkeypatch):
    fake = FakeLLM()

    def make(config):
        fake.config = config
        return fake

    monkeypatch.setattr(cli, "make_llm", make)
    return fake


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch, tmp_path):
    for variable in [name for name in os.environ if name.startswith("PANDO_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def give(monkeypatch, content: bytes):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def python(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, **options)


# --- the package -------------------------------------------------------------------------------------------------------------------


def test_help_and_version_need_no_torch():
    for argument in ("--help", "version"):
        script = (
            f"import sys; from pando.cli import main\ntry: main([{argument!r}])\nexcept SystemExit: pass\nsys.exit('torch' in sys.modules)"
        )
        done = python("-c", script)
        assert done.returncode == 0, done.stderr
        assert "pando" in done.stdout


def test_the_checkout_runs_without_being_installed():
    done = python("-S", "-m", "pando", "version")  # -S: no site-packages
    assert done.stdout == f"pando {pando.__version__}\n"


def test_a_missing_dependency_is_named_without_a_traceback():
    done = python("-S", "-m", "pando", "run", "hi")
    assert done.returncode == 2
    assert re.fullmatch(r"pando: error: the package \w+ is missing here; .*`make dev`\n", done.stderr)


def test_a_misspelt_variable_is_said_once_and_the_command_goes_on(monkeypatch, capsys):
    monkeypatch.setenv("PANDO_DEVICES", "cpu")
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "pando: warning: the environment variable PANDO_DEVICES is not an option, and is ignored; did you mean PANDO_DEVICE?"
    ]


def test_public_names_load_on_first_use():
    assert pando.SamplingParams is SamplingParams
    assert issubclass(InvalidOption, pando.PandoError)
    assert {"LLM", "RequestOutput", "CompletionOutput"} <= set(dir(pando))
    with pytest.raises(AttributeError, match="Nothing"):
        pando.Nothing  # noqa: B018


# --- pando run ---------------------------------------------------------------------------------------------------------------------


def test_run_streams_the_answer_through_the_chat_template(llm, capsys):
    assert cli.main(["run", "Capital of France?", "--system", "Be brief."]) == 0
    assert capsys.readouterr().out == "Paris.\n"
    assert llm.asked == [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital of France?"}]]
    assert (llm.sampled[0].temperature, llm.sampled[0].max_tokens) == (0.0, 512)
    assert llm.config.model == "smollm2-135m"


@pytest.mark.parametrize(
    "line", ["run other hello", "run other --max-tokens 5 hello", "run --max-tokens 5 other hello", "run -- other hello"]
)
def test_a_model_may_stand_before_the_prompt(llm, line):
    assert cli.main(line.split()) == 0
    assert llm.config.model == "other"
    assert llm.asked[0][-1]["content"] == "hello"


def test_raw_skips_the_chat_template(llm):
    assert cli.main(["run", "--raw", "Once upon"]) == 0
    assert llm.asked == ["Once upon"]


@pytest.mark.parametrize("options", ["", "--raw", "--json", "--raw --n 2"])
def test_the_oldest_part_of_a_long_prompt_is_dropped_if_that_is_asked_for(llm, options):
    for truncation in ("auto", "disabled"):
        assert cli.main(["run", "--truncation", truncation, *options.split(), "hi"]) == 0
    assert cli.main(["run", *options.split(), "hi"]) == 0
    assert llm.truncations == ["auto", "disabled", "disabled"]


def test_what_was_dropped_is_told(capsys, monkeypatch):
    real = tiny_llm(max_model_len=64)
    monkeypatch.setattr(cli, "make_llm", lambda config: real)
    monkeypatch.setattr(real, "close", lambda: None)  # several commands use it
    assert cli.main(["run", "--raw", "--max-tokens", "4", "a b c " * 40]) == 2
    assert "tokens, or ask for --truncation auto, which drops its oldest part\n" in capsys.readouterr().err
    assert cli.main(["run", "--raw", "--truncation", "auto", "--max-tokens", "4", "a b c " * 40]) == 0
    shown = capsys.readouterr().err
    told = re.search(r"(\d+) of its tokens were dropped", shown)
    assert told and "approximate" not in shown  # nothing of it was cached: what is left was computed
    assert cli.main(["run", "--raw", "--truncation", "auto", "--max-tokens", "4", "--json", "a b c " * 40]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["num_dropped_tokens"] == int(told[1]) and printed["num_prompt_tokens"] - int(told[1]) < 64
    assert sum(printed["tokens"].values()) == printed["num_prompt_tokens"] - int(told[1])


@pytest.mark.parametrize("options", ["--raw", "--raw --n 2"])
@pytest.mark.parametrize(
    ("reuse", "told"),
    [
        (Reuse(device=9, truncated=Truncated(((8, 520),), moved=9)), "the tokens that were kept had been computed behind those"),
        (Reuse(device=9, modules=1), "1 module token had been encoded in another context"),
        (Reuse(device=9, rounded=True), "some of what was reused had been kept with a codec that rounds"),
        (Reuse(device=9), None),
    ],
)
def test_an_approximate_answer_says_that_it_is_one(llm, capsys, options, reuse, told):
    llm.reuse = reuse
    assert cli.main(["run", *options.split(), "hi"]) == 0
    shown = capsys.readouterr().err
    assert f"the answer is approximate: {told}\n" in shown if told else "approximate" not in shown


@pytest.mark.parametrize("sizes", [{"max_model_len": 64}, {"kv_cache_tokens": 64}])
@pytest.mark.parametrize("options", ["--raw", "--raw --json", "--raw --n 2"])
def test_a_prompt_that_does_not_fit_is_refused_with_the_flag_that_helps(capsys, monkeypatch, sizes, options):
    monkeypatch.setattr(cli, "make_llm", lambda config: tiny_llm(**sizes))
    assert cli.main(["run", *options.split(), "--max-tokens", "4", "a b c " * 40]) == 2
    told = capsys.readouterr().err
    assert "ask for --truncation auto, which drops its oldest part" in told and "truncation=" not in told


def test_one_of_a_thing_is_told_as_one():
    assert str(chat.Speed(0.0, prompt_tokens=1)).startswith("1 prompt token, 0 cached")
    assert str(Busy(1, 3)) == "1 request is waiting, as many as may; try again in about 3 s"
    assert str(Busy(2, 3)).startswith("2 requests are waiting")


def test_sampling_options_reach_the_engine(llm):
    options = "--temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --seed 7 --stop END --stop . --max-tokens 3"
    assert cli.main(["run", *options.split(), "hi"]) == 0
    assert llm.sampled == [SamplingParams(temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=7, stop=["END", "."], max_tokens=3)]


@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_a_seed_is_the_same_wherever_it_is_said(llm, source, tmp_path, monkeypatch):
    (tmp_path / "pando.toml").write_text("seed = 7" if source == "file" else "")
    if source == "environment":
        monkeypatch.setenv("PANDO_SEED", "7")
    flags = ["--seed", "7"] if source == "flag" else []
    assert cli.main(["run", "--config", str(tmp_path / "pando.toml"), *flags, "hi"]) == 0
    assert llm.sampled[0].seed == 7


def test_a_request_has_no_seed_unless_one_is_given(llm):
    assert cli.main(["run", "hi"]) == 0
    assert llm.sampled[0].seed is None


def test_a_dash_reads_the_prompt_from_standard_input(llm, monkeypatch):
    give(monkeypatch, "Überall?".encode())
    assert cli.main(["run", "-"]) == 0
    assert llm.asked[0][-1]["content"] == "Überall?"


@pytest.mark.parametrize("line", ["run model --raw -", "run model --max-tokens 9 - --raw", "run --raw model -"])
def test_options_may_stand_between_a_model_and_a_dash(llm, monkeypatch, line):
    give(monkeypatch, b"Hello")
    assert cli.main(line.split()) == 0
    assert (llm.asked, llm.config.model) == (["Hello"], "model")


def test_a_model_alone_is_no_prompt(llm, capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "one.gguf").write_text("")
    for model in (tmp_path, tmp_path / "one.gguf", EngineConfig.model):
        assert cli.main(["run", str(model), "--max-tokens", "3"]) == 2
        assert "is a model, and there is no prompt" in capsys.readouterr().err
    assert not llm.asked


@pytest.mark.parametrize(("line", "says"), [
    ("serve --model x", "give the model without a flag"), ("serve -tp 2", "one GPU"), ("chat --kv-cache-dtype fp8", "--kv-dtype"),
])  # fmt: skip
def test_flags_of_other_engines_are_told_what_there_is(llm, capsys, line, says):
    assert cli.main(line.split()) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_an_answer_that_was_cut_says_so(llm, capsys, finish):
    llm.finish = finish
    assert cli.main(["run", "hi"]) == 0
    assert ("cut off at the token limit" in capsys.readouterr().err) == (finish == "length")
    assert cli.main(["run", "hi", "--max-tokens", "3"]) == 0
    assert not capsys.readouterr().err, "who gives a limit knows of it"


@pytest.mark.parametrize("options", [["--n", "2"], ["--json"], []])
def test_what_was_reused_is_told_however_the_answer_is_printed(llm, capsys, options):
    assert cli.main(["run", "hi", "--stats", *options]) == 0
    assert "42 prompt tokens, 30 cached" in capsys.readouterr().err


def test_json_is_one_object_with_everything_that_was_counted(llm, capsys):
    assert cli.main(["run", "--json", "--n", "2", "hi"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["num_prompt_tokens"], printed["num_cached_tokens"], printed["model"]) == (42, 30, "smollm2-135m")
    expected = {"text": "Paris.", "token_ids": [1, 2, 3], "finish_reason": "stop", "stop_reason": None}
    assert printed["outputs"] == [{"index": 0, **expected}, {"index": 1, **expected}]


def test_several_answers_are_told_apart(llm, capsys):
    assert cli.main(["run", "--n", "2", "--raw", "hi"]) == 0
    assert capsys.readouterr().out == "--- 1 of 2\nParis.\n--- 2 of 2\nParis.\n"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("run hi --temperature -1", "temperature is -1.0"),
        ("run hi --top-p 0", "top_p is 0"),
        ("run hi --temperature warm", "invalid float value: 'warm'"),
        ("run hi --max-num-seqs 0", "--max-num-seqs: max_num_seqs is 0; it must be a whole number from 1"),
        ("run hi --device tpu", "must be one of auto, cpu, cuda"),
        ("run hi --no-such-option", "--no-such-option"),
        ("run a b c", "unknown argument 'c'"),
        ("run", "PROMPT"),
        ("run hi --raw --system x", "--system needs a chat template, and --raw uses none"),
        ("run hi --config nowhere.toml", "nowhere.toml: cannot be read"),
        ("sing", "invalid choice: 'sing'"),
        ("", "COMMAND"),
        ("pull --max-num-seqs 3", "--max-num-seqs"),
        ("run hi --port 8000", "--port"),
        ("serve --port 70000", "--port: port is 70000; it must be a whole number from 0 to 65535"),
        ("serve --max-num-seqs 0", "--max-num-seqs: max_num_seqs is 0"),
        ("serve a b", "unknown argument 'b'"),
        ("serve --api", "unknown argument '--api'"),
        ("serve --max-model-length 9", "unknown argument '--max-model-length'; did you mean --max-model-len? See `pando serve --help`"),
        ("serve --max-model-length=9", "unknown argument '--max-model-length'; did you mean --max-model-len?"),
        ("cache ls --page", "unknown argument '--page'; did you mean --pages? See `pando cache ls --help`"),
        ("bench serve --requets 9", "did you mean --requests? See `pando bench serve --help`"),
        ("serve --enable-prefix-caching", "did you mean --prefix-caching?"),
        ("serve --no_overlap", "unknown argument '--no_overlap'; did you mean --no-overlap?"),
        ("serve --nooverlap", "unknown argument '--nooverlap'; did you mean --no-overlap?"),
        ("serve --nothing-like-it", "unknown argument '--nothing-like-it'; see `pando serve --help`"),
        (
            "serve --ttl 7y",
            "--ttl: ttl is '7y'; it must be a whole number of seconds from 0 to 2147483647, or for example 12h, or auto",
        ),
        ("bench serve --workload multiturn", "did you mean multi-turn? See `pando bench serve --help`"),
        ("bench serve --workload haiku", "(choose from 'shared-prefix', 'multi-turn', 'lengths'); see `pando bench serve --help`"),
        ("bench serv", "there is no benchmark 'serv'; did you mean serve? See `pando bench --help`"),
        ("serv", "did you mean serve? See `pando --help`"),
        ("serve --kv-cache-dtype fp8", "unknown argument '--kv-cache-dtype'; it is --kv-dtype here"),
        ("serve -np 4", "unknown argument '-np'; it is --max-num-seqs here"),
        ("serve --no-enable-prefix-caching", "it is --no-prefix-caching here"),
        ("chat --context-shift", "it is --truncation auto here"),
        ("serve --swap-space 4", "it is --host-gib here"),
        ("serve --ubatch-size 512", "it is --max-num-batched-tokens here"),
        ("serve --jinja", "calls are recognised without it: leave it out"),
        ("serve --alias small", "it is --served-model-name here"),
        ("serve -hf owner/name", "unknown argument '-hf'; give the model without a flag, as in `pando serve MODEL`"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(llm, capsys, line, complaint):
    assert cli.main(line.split()) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("pando: error: ")
    assert complaint in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("bad", [b"\xff\xfe", "\udcff"])
def test_a_prompt_that_is_not_utf8_is_refused(llm, monkeypatch, capsys, bad):
    give(monkeypatch, bad if isinstance(bad, bytes) else b"")
    assert cli.main(["run", "-" if isinstance(bad, bytes) else bad]) == 2
    assert "not UTF-8" in capsys.readouterr().err


def test_an_error_of_the_engine_shows_no_traceback(llm, capsys):
    llm.limit = 3
    assert cli.main(["run", "--raw", "too long"]) == 2
    assert capsys.readouterr().err == "pando: error: the prompt has 8 tokens and the context holds 3; shorten it\n"


def test_a_model_that_computes_no_numbers_is_an_error(llm, capsys):
    llm.finish = "error"
    assert cli.main(["run", "hi"]) == 2
    assert "not numbers" in capsys.readouterr().err


def test_ctrl_c_exits_130(llm, capsys):
    llm.interrupt_at = 1
    assert cli.main(["run", "hi"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error():
    script = """
import sys
from pando import cli
from pando.engine.request import TokenEvent

class Endless:
    def stream_chat(self, messages, sampling, truncation="disabled"):
        while True:
            yield TokenEvent("0", 0, 0, "word ")

    def close(self):
        pass

cli.make_llm = lambda config: Endless()
sys.exit(cli.main(["run", "hi"]))
"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(5)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=300) == 141


def test_bench_reads_its_own_arguments(monkeypatch):
    given = []
    bench = types.ModuleType("pando.bench.foundation")
    bench.main = lambda argv: given.append(argv) or 7
    monkeypatch.setitem(sys.modules, "pando.bench.foundation", bench)
    assert cli.main(["bench", "--quick", "-h"]) == 7
    assert given == [["--quick", "-h"]]


# --- pando serve -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch):
    """What the server was started with, without one."""
    given = []
    server = types.ModuleType("pando.server.serve")
    server.serve = lambda engine, server: given.append((engine, server)) or 5
    monkeypatch.setitem(sys.modules, "pando.server.serve", server)
    return given


def test_serve_starts_with_the_defaults_and_hands_on_its_exit_code(served):
    assert cli.main(["serve"]) == 5
    assert served == [(EngineConfig(), ServerConfig())]


def test_serve_takes_the_words_of_vllm(served):
    line = (
        "serve some/model --host 0.0.0.0 --port 0 --served-model-name tiny --api-key one --api-key two --max-model-len 512 "
        "--max-num-seqs 8 --max-num-batched-tokens 256 --dtype float32 --seed 3 --chat-template my.jinja --disable-log-requests"
    )
    assert cli.main(line.split()) == 5
    engine = EngineConfig(model="some/model", max_model_len=512, max_num_seqs=8, max_num_batched_tokens=256, dtype="float32", seed=3)
    server = ServerConfig(
        host="0.0.0.0", port=0, served_model_name="tiny", api_key=("one", "two"), chat_template="my.jinja", disable_log_requests=True
    )
    assert served == [(engine, server)]


def test_serve_reads_one_file_and_one_environment_for_both(served, monkeypatch, tmp_path):
    file = tmp_path / "pando.toml"
    file.write_text('max_num_seqs = 2\nport = 9000\nmax_queue = 5\ncors_origins = ["https://a.example", "https://b.example"]\n')
    monkeypatch.setenv("PANDO_API_KEY", "one, two")
    monkeypatch.setenv("PANDO_MAX_QUEUE", "6")
    assert cli.main(["serve", "--config", str(file), "--port", "9001"]) == 5
    [(engine, server)] = served
    assert (engine.max_num_seqs, server.port, server.max_queue, server.api_key) == (2, 9001, 6, ("one", "two"))
    assert server.cors_origins == ("https://a.example", "https://b.example")


@pytest.mark.parametrize("option", [*fields(EngineConfig)[1:], *fields(ServerConfig)], ids=lambda option: option.name)
def test_the_help_of_serve_explains_every_option_and_its_default(option, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setenv("PANDO_API_KEY", "my-secret-key")
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    shown = capsys.readouterr().out
    flag = "--" + option.name.replace("_", "-")
    [text] = re.findall(rf"^  {flag}(?![\w-]).*\n? *.*$", shown, re.MULTILINE)
    default = {"None": "auto", "()": "none", "True": "on", "False": "off", "": "empty"}.get(str(option.default), str(option.default))
    assert option.metadata["doc"] in text
    assert f"({default})" in text
    assert "my-secret-key" not in shown


def test_without_the_packages_of_the_server_one_line_says_what_to_install(monkeypatch, capsys):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name="fastapi")

    server = types.ModuleType("pando.server.serve")
    server.__getattr__ = missing
    monkeypatch.setitem(sys.modules, "pando.server.serve", server)
    assert cli.main(["serve"]) == 2
    shown = capsys.readouterr().err
    assert shown == (
        "pando: error: the package fastapi is missing here; "
        "install it with `pip install 'pando-llm[serve]'`, or in a checkout with `make dev`\n"
    )


def test_every_benchmark_is_named_and_any_other_refused(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    told = capsys.readouterr().out
    for name in PARTS:
        assert f"pando bench {name} " in told
        with pytest.raises(SystemExit):
            cli.main(["bench", name, "--help"])
        assert f"pando bench {name} " in capsys.readouterr().out
    assert cli.main(["bench", "nosuch"]) == 2
    assert "no benchmark 'nosuch'" in capsys.readouterr().err


@pytest.mark.parametrize("line", [
    "bench", "bench modules", "bench store", "bench truncation", "bench trace --generate sharegpt", "bench overhead", "bench soak",
    "schema quality s.pml --prompts p.pml",
])  # fmt: skip
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(capsys, tmp_path, line):
    for file, complaint in ((tmp_path / "none" / "x.json", "there is no folder"), (tmp_path, "is a folder")):
        assert cli.main([*line.split(), "--json", str(file)]) == 2
        assert complaint in capsys.readouterr().err


def test_bench_serve_reads_its_own_arguments(monkeypatch):
    given = []
    bench = types.ModuleType("pando.bench.serve")
    bench.main = lambda argv: given.append(argv) or 3
    monkeypatch.setitem(sys.modules, "pando.bench.serve", bench)
    assert cli.main(["bench", "serve", "--url", "x", "-h"]) == 3
    assert given == [["--url", "x", "-h"]]


# --- pando pull --------------------------------------------------------------------------------------------------------------------


def test_pull_lists_the_catalogue_and_knows_the_default(capsys):
    assert cli.main(["pull", "--list"]) == 0
    assert any(line.startswith("smollm2-135m ") for line in capsys.readouterr().out.splitlines())


def test_pull_of_a_directory_prints_where_the_model_is(monkeypatch, tmp_path, capsys):
    from pando.model import hub

    files = hub.ModelFiles(tmp_path, tmp_path / "config.json", (), tmp_path / "tokenizer.json")
    asked = []
    monkeypatch.setattr(hub, "resolve", lambda name: asked.append(name) or files)
    assert cli.main(["pull"]) == 0
    assert cli.main(["pull", "some/model"]) == 0
    assert asked == ["smollm2-135m", "some/model"]
    assert capsys.readouterr().out == f"{tmp_path}\n" * 2


def test_pull_of_a_model_that_does_not_exist_is_exit_code_2(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PANDO_HOME", str(tmp_path))
    assert cli.main(["pull", "smollm2-136m"]) == 2
    assert "smollm2-135m" in capsys.readouterr().err


# --- pando chat --------------------------------------------------------------------------------------------------------------------


class Terminal:
    """Types the given lines; an exception among them is raised instead, and the end is Ctrl-D."""

    def __init__(self, *lines):
        self.lines, self.prompts = list(lines), []

    def __call__(self, prompt):
        self.prompts.append(prompt)
        line = self.lines.pop(0) if self.lines else EOFError()
        if isinstance(line, str):
            return line
        raise line


class Screen(io.StringIO):
    def isatty(self):
        return True


def talk(llm, *lines, out=None, clock=None):
    ticks = iter(x / 10 for x in range(10_000))
    conversation = chat.Conversation(llm, SamplingParams(), out or io.StringIO(), clock=clock or (lambda: next(ticks)))
    terminal = Terminal(*lines)
    chat.converse(conversation, terminal)
    return conversation, terminal, conversation.out.getvalue()


def said(llm, turn=-1):
    return [(message["role"], message["content"]) for message in llm.asked[turn]]


def test_a_conversation_past_the_window_goes_on_and_says_what_was_dropped():
    llm = FakeLLM()
    llm.reuse = Reuse(30, truncated=Truncated(((8, 520),)))
    _, _, shown = talk(llm, "hi")
    assert llm.truncations == ["auto"]
    assert "42 prompt tokens, 30 cached · the oldest 512 dropped · " in shown and "approximate" not in shown
    llm.reuse = Reuse(30, truncated=Truncated(((8, 520),), moved=22))
    assert " · approximate: truncated" in talk(llm, "hi")[2]


def test_a_conversation_is_remembered():
    llm = FakeLLM()
    _, _, shown = talk(llm, "Capital of France?", "And of Italy?")
    assert shown.startswith("Paris.\n")
    assert said(llm) == [("user", "Capital of France?"), ("assistant", "Paris."), ("user", "And of Italy?")]


def test_each_answer_is_followed_by_what_it_cost():
    _, _, shown = talk(FakeLLM(), "hi")
    assert shown.splitlines()[1] == "42 prompt tokens, 30 cached · 0.10 s to first token · 10 tokens/s"


def test_the_cost_is_dim_on_a_terminal_and_plain_where_colour_is_unwanted(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[2m42 prompt tokens" in talk(FakeLLM(), "hi", out=Screen())[2]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in talk(FakeLLM(), "hi", out=Screen())[2]


def test_an_answer_at_the_limit_says_so():
    assert "cut off at the token limit" in talk(FakeLLM(finish="length"), "hi")[2]


def test_reset_forgets_and_system_begins_again():
    llm = FakeLLM()
    talk(llm, "one", "/reset", "two", "/system Be brief.", "three", "/system", "four")
    assert said(llm, 1) == [("user", "two")]
    assert said(llm, 2) == [("system", "Be brief."), ("user", "three")]
    assert said(llm, 3) == [("user", "four")]


def test_commands_help_exit_and_unknown():
    llm = FakeLLM()
    _, terminal, shown = talk(llm, "/help", "/frobnicate", " /usr is a folder", "", "/exit", "never read")
    assert "/reset" in shown
    assert "no command /frobnicate" in shown
    assert said(llm) == [("user", "/usr is a folder")]
    assert len(llm.asked) == 1
    assert terminal.lines == ["never read"]


def test_a_backslash_continues_the_turn():
    llm = FakeLLM()
    _, terminal, _ = talk(llm, "first\\", "second\\", "third")
    assert said(llm) == [("user", "first\nsecond\nthird")]
    assert terminal.prompts[:3] == ["> ", ". ", ". "]


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said():
    llm = FakeLLM(words=("Par", "is", " is", " large"), interrupt_at=1)
    before = signal.getsignal(signal.SIGINT)
    conversation, _, shown = talk(llm, "hi")
    assert conversation.turns[-1] == {"role": "assistant", "content": "Paris"}
    assert "stopped" in shown
    assert "large" not in shown
    assert llm.closed == 1, "the request was not cancelled"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_leaves_an_answer_that_does_not_stop():
    def stuck(messages, sampling, truncation):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        yield from ()

    llm = FakeLLM()
    llm.stream_chat = stuck
    with pytest.raises(KeyboardInterrupt):
        talk(llm, "hi")


def test_ctrl_c_at_the_prompt_asks_once():
    llm = FakeLLM()
    _, terminal, shown = talk(llm, KeyboardInterrupt(), "hi", KeyboardInterrupt(), KeyboardInterrupt(), "never read")
    assert shown.count("Ctrl-C again to leave") == 2
    assert len(llm.asked) == 1
    assert terminal.lines == ["never read"]


def test_a_conversation_too_long_is_told_kindly_and_goes_on_after_reset():
    llm = FakeLLM(limit=200)
    conversation, _, shown = talk(llm, "short", "long " * 50, "/reset", "short")
    assert "no longer fits" in shown
    assert "/reset begins a new one" in shown
    assert said(llm) == [("user", "short")]
    assert len(conversation.turns) == 2


def test_over_a_pipe_every_line_is_a_turn(llm, monkeypatch, capsys):
    give(monkeypatch, b"Capital of France?\n\nAnd of Italy?\r\n")
    assert cli.main(["chat", "--system", "Be brief."]) == 0
    out = capsys.readouterr().out
    assert out.count("Paris.\n") == 2
    assert ">" not in out
    assert said(llm)[-1] == ("user", "And of Italy?")
    assert said(llm)[0] == ("system", "Be brief.")


def test_an_empty_pipe_is_a_short_conversation(llm, monkeypatch, capsys):
    give(monkeypatch, b"")
    assert cli.main(["chat"]) == 0
    assert capsys.readouterr().out == ""


def test_over_a_pipe_an_error_ends_with_exit_code_2(llm, monkeypatch, capsys):
    llm.limit = 60
    give(monkeypatch, b"long " * 50)
    assert cli.main(["chat"]) == 2
    assert "pando: error: the prompt has" in capsys.readouterr().err
    with pytest.raises(InvalidPrompt, match="not UTF-8"):
        chat.read_all(chat.Conversation(llm, SamplingParams(), io.StringIO()), io.BytesIO(b"\xff\n"))


def test_lines_typed_are_kept_for_their_owner_alone(tmp_path):
    readline = pytest.importorskip("readline")
    file = chat.history_file()
    assert file == tmp_path / "pando" / "history"
    before = os.umask(0)
    try:
        readline.clear_history()
        with chat.remembered_lines(file):
            readline.add_history("my secret question")
    finally:
        os.umask(before)
    assert "my secret question" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    readline.clear_history()
    with chat.remembered_lines(file):
        assert readline.get_history_item(1) == "my secret question"
    readline.clear_history()


def test_a_home_that_cannot_be_written_costs_only_the_history(tmp_path):
    (tmp_path / "pando").write_text("a file where the folder should be")
    with chat.remembered_lines(chat.history_file()):
        pass


def test_nor_does_it_cost_more_that_there_is_no_home(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(chat.Path, "home", homeless)
    with chat.remembered_lines(chat.history_file()):
        pass


# --- options -----------------------------------------------------------------------------------------------------------------------


def test_a_later_source_wins(tmp_path):
    file = tmp_path / "pando.toml"
    file.write_text('max_num_seqs = 2\npage_size = 16\nmodel = "from-file"\nkv_cache_tokens = "auto"\n')
    config = load({"max_num_seqs": "4"}, {"PANDO_MAX_NUM_SEQS": "3", "PANDO_PAGE_SIZE": "32", "PANDO_PREFIX_CACHING": "off"}, file)
    assert (config.max_num_seqs, config.page_size, config.model) == (4, 32, "from-file")
    assert (config.prefix_caching, config.kv_cache_tokens, config.seed) == (False, None, 0)


def test_auto_means_the_same_in_python():
    config = EngineConfig(max_model_len="auto", overlap="auto", remote="auto", disk_dir="auto", threads="auto")
    assert config == EngineConfig()
    with pytest.raises(InvalidOption, match="overlap is 'never'; it must be true or false, or auto"):
        EngineConfig(overlap="never")


def test_auto_takes_back_what_an_earlier_source_set():
    assert load({"threads": "auto"}, {"PANDO_THREADS": "3"}, None).threads is None


@pytest.mark.parametrize(
    ("cli_values", "environ", "toml", "complaint"),
    [
        ({}, {}, "max_seqs = 2", "pando.toml: unknown option 'max_seqs'; did you mean max_num_seqs?"),
        ({}, {}, "Max-Num-Seqs = 2", "pando.toml: unknown option 'Max-Num-Seqs'; did you mean max_num_seqs?"),
        ({}, {}, "kv_cache_dtype = 'fp8'", "pando.toml: unknown option 'kv_cache_dtype'; it is kv_dtype here"),
        ({}, {}, "enforce_eager = true", "pando.toml: unknown option 'enforce_eager'; it is cuda_graphs = false here"),
        ({}, {}, "no_cuda_graphs = true", "pando.toml: unknown option 'no_cuda_graphs'; it is cuda_graphs = false here"),
        ({}, {}, "context_shift = true", "pando.toml: unknown option 'context_shift'; it is truncation = \"auto\" here"),
        ({}, {}, "temperature = 1", "pando.toml: unknown option 'temperature'; known are model, device"),
        ({}, {}, "max_num_seqs = '2'", "pando.toml: max_num_seqs is '2'; it must be a whole number"),
        ({}, {}, "prefix_caching = 1", "pando.toml: prefix_caching is 1; it must be true or false"),
        ({}, {}, "seed = true", "pando.toml: seed is True"),
        ({}, {}, "seed = 1.5", "pando.toml: seed is 1.5"),
        ({}, {}, "seed = ", "pando.toml: not valid TOML"),
        ({}, {}, "[engine]\nseed = 1", "pando.toml: unknown option 'engine'; write options at the top of the file"),
        ({}, {"PANDO_DTYPE": "int3"}, "", "PANDO_DTYPE: dtype is 'int3'; it must be one of auto, float32, bfloat16, float16"),
        ({}, {"PANDO_PREFIX_CACHING": "maybe"}, "", "PANDO_PREFIX_CACHING: prefix_caching is 'maybe'"),
        ({}, {"PANDO_SEED": "auto"}, "", "PANDO_SEED: seed is 'auto'"),
        ({"threads": "many"}, {}, "", "--threads: threads is 'many'; it must be a whole number from 1 to 4096, or auto"),
        ({"page_size": "-1"}, {}, "", "--page-size: page_size is -1"),
        ({"model": ""}, {}, "", "MODEL: model is empty"),
        ({"pages": 3}, {}, "", "unknown option 'pages'"),
        ({"kv_cache_tokens": "8"}, {}, "", "less than one page of 64 tokens; raise it to at least 64"),
    ],
)
def test_a_bad_option_names_its_source_and_what_is_expected(tmp_path, cli_values, environ, toml, complaint):
    file = tmp_path / "pando.toml"
    file.write_text(toml)
    with pytest.raises(InvalidOption) as caught:
        load(cli_values, environ, file)
    assert complaint in str(caught.value)


def test_a_configuration_made_in_python_is_checked_too():
    with pytest.raises(InvalidOption, match="max_num_batched_tokens is 0"):
        EngineConfig(max_num_batched_tokens=0)
    with pytest.raises(InvalidOption, match="device is 'tpu'"):
        EngineConfig(device="tpu")


def test_a_file_of_other_bytes_is_no_configuration(tmp_path):
    file = tmp_path / "pando.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidOption, match="not valid TOML"):
        load({}, {}, file)


@pytest.mark.parametrize("option", [option for option in fields(EngineConfig) if option.name != "model"], ids=lambda option: option.name)
def test_every_engine_option_has_a_flag_and_a_sentence(option):
    flag = "--" + option.name.replace("_", "-")
    value = (
        [] if option.name == "prefix_caching" else [{"device": "cpu", "dtype": "float32", "attention": "reference"}.get(option.name, "77")]
    )
    given = arguments.parse(["run", flag, *value, "hi"])
    assert getattr(given, option.name) is not None
    assert len(option.metadata["doc"]) > 20
