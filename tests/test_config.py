"""Options of the server and of the engine: where they come from, and what is refused."""

from dataclasses import FrozenInstanceError, fields

import pytest

from pando.config import EngineConfig, ServerConfig, choices, kinds, load, load_server, misspelt, options
from pando.errors import InvalidOption


def test_no_two_options_have_the_same_name():
    assert not {option.name for option in options()} & {option.name for option in options(ServerConfig)}


def test_a_later_source_wins(tmp_path):
    file = tmp_path / "pando.toml"
    file.write_text('port = 1\nmax_queue = 1\npin_quota = 1\nmodel = "tiny"\napi_key = ["from-file"]\nserved_model_name = "named"\n')
    cli = {"port": "3", "api_key": None, "served_model_name": "auto"}
    engine, server = load_server(cli, {"PANDO_PORT": "2", "PANDO_MAX_QUEUE": "2"}, file)
    assert (server.port, server.max_queue, server.pin_quota) == (3, 2, 1)
    assert (engine.model, server.api_key, server.served_model_name) == ("tiny", ("from-file",), None)


def test_several_values_come_as_an_array_with_commas_or_one_by_one(tmp_path):
    file = tmp_path / "pando.toml"
    file.write_text('share_prefix = ["a.txt", "b, c.txt"]\n')
    assert load_server({}, {}, file)[1].share_prefix == ("a.txt", "b, c.txt")
    assert load_server({}, {"PANDO_SHARE_PREFIX": "a.txt, b.txt"}, file)[1].share_prefix == ("a.txt", "b.txt")
    assert load_server({"share_prefix": ["a,b.txt"]}, {}, file)[1].share_prefix == ("a,b.txt",)


def test_a_file_may_begin_with_the_mark_that_some_editors_write(tmp_path):
    file = tmp_path / "pando.toml"
    file.write_text("max_num_seqs = 2\n", encoding="utf-8-sig")
    assert load({}, {}, file) == EngineConfig(max_num_seqs=2)


def test_a_misspelt_variable_is_named_with_the_one_that_was_meant():
    right = {f"PANDO_{option.name.upper()}": "1" for option in (*options(), *options(ServerConfig))}
    others = {"PANDO_HOME": "/x", "PANDO_BENCH_DATA": "/y", "PATH": "/bin", "OTHER_MAX_SEQS": "1"}
    cluster = {"PANDO_SERVICE_HOST": "10.0.0.1", "PANDO_PORT_8000_TCP_ADDR": "10.0.0.1", "PANDO_CHAT_PORT": "tcp://10.0.0.1:80"}
    assert misspelt({**right, **others, **cluster}) == []
    wrong, strange = misspelt({**right, **others, "PANDO_MAX_SEQS": "8", "PANDO_XYZZY": "1"})
    assert wrong == "the environment variable PANDO_MAX_SEQS is not an option, and is ignored; did you mean PANDO_MAX_NUM_SEQS?"
    assert strange == "the environment variable PANDO_XYZZY is not an option, and is ignored"


def test_a_file_of_the_server_serves_the_other_commands_too(tmp_path):
    file = tmp_path / "pando.toml"
    file.write_text("port = 9000\nmax_num_seqs = 2\n")
    assert load({}, {"PANDO_PORT": "not theirs"}, file) == EngineConfig(max_num_seqs=2)
    file.write_text("port = 'x'")
    with pytest.raises(InvalidOption, match="port is 'x'"):
        load({}, {}, file)
    with pytest.raises(InvalidOption, match="unknown option 'port'"):
        load({"port": 1}, {}, None)


@pytest.mark.parametrize(
    ("cli", "environ", "toml", "complaint"),
    [
        ({}, {}, "prot = 2", "pando.toml: unknown option 'prot'; did you mean port?"),
        ({}, {}, "port = 65536", "pando.toml: port is 65536; it must be a whole number from 0 to 65535"),
        ({}, {}, "share_prefix = 'a.txt'", "pando.toml: share_prefix is 'a.txt'; it must be a list of texts"),
        ({}, {}, "share_prefix = [1]", "pando.toml: share_prefix is (1,); it must be a list of texts"),
        ({}, {}, "log_prompts = 'yes'", "pando.toml: log_prompts is 'yes'; it must be true or false"),
        ({}, {}, "host = ''", "pando.toml: host is empty; write 127.0.0.1"),
        ({}, {}, "served_model_name = 3", "pando.toml: served_model_name is 3; it must be text, or auto"),
        ({}, {"PANDO_API_KEY": ""}, "", "PANDO_API_KEY: api_key is empty; an empty key lets nobody in"),
        ({}, {"PANDO_API_KEY": "a,,b"}, "", "PANDO_API_KEY: api_key is empty"),
        ({}, {"PANDO_LOG_LEVEL": "loud"}, "", "PANDO_LOG_LEVEL: log_level is 'loud'; it must be one of debug, info, warning, error"),
        ({}, {"PANDO_PORT": "tcp://10.0.0.1:80"}, "", "PANDO_PORT: port is 'tcp://10.0.0.1:80'; it must be a whole number"),
        ({"metrics_compat": "statsd"}, {}, "", "--metrics-compat: metrics_compat is 'statsd'; it must be one of none, vllm"),
        ({"pin_quota": "101"}, {}, "", "--pin-quota: pin_quota is 101; it must be a whole number from 0 to 100"),
        ({"cors_origins": ["https://a.example/"]}, {}, "", "cors_origins has 'https://a.example/'; write scheme and host"),
        ({"remote": "s3://bucket"}, {}, "", "remote is of the kind 's3'; write redis://HOST:6379/0"),
        ({"remote": "redis://:secret@cache:6379x/0"}, {}, "", "remote has no good port; write redis://HOST:6379/0"),
        ({"remote": "rediss://cache:70000"}, {}, "", "remote has no good port"),
        ({"cors_origins": ["a.example"]}, {}, "", "cors_origins has 'a.example'"),
        ({"ports": 3}, {}, "", "unknown option 'ports'"),
    ],
)
def test_a_bad_option_names_its_source_and_what_is_expected(tmp_path, cli, environ, toml, complaint):
    file = tmp_path / "pando.toml"
    file.write_text(toml)
    with pytest.raises(InvalidOption) as caught:
        load_server(cli, environ, file)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    "toml", ['api_key = "my-secret"', 'api_key = ["my-secret", 1]', 'api_key = ["my-secret key"]', 'api_key = ["my-secret", ""]']
)
def test_a_key_is_never_shown(tmp_path, toml):
    file = tmp_path / "pando.toml"
    file.write_text(toml)
    with pytest.raises(InvalidOption) as caught:
        load_server({}, {}, file)
    assert "api_key" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "my-key" not in repr(ServerConfig(api_key=("my-key",)))


@pytest.mark.parametrize("key", ["two words", "ключ", "line\nbreak", "tab\t"])
def test_a_key_that_no_client_can_send_is_refused(key):
    with pytest.raises(InvalidOption, match="which no client can send"):
        ServerConfig(api_key=(key,))


@pytest.mark.parametrize(("text", "count"), [("90", 90), ("45s", 45), ("30m", 1800), ("12h", 43200), ("7d", 604800), ("2w", 1209600)])
def test_a_time_may_be_written_with_its_unit_wherever_options_are(tmp_path, text, count):
    file = tmp_path / "pando.toml"
    file.write_text(f"ttl = {text if text.isdecimal() else repr(text)}")
    assert load({}, {}, file).ttl == load({}, {"PANDO_TTL": text}, None).ttl == load({"ttl": text}, {}, None).ttl == count
    assert EngineConfig(ttl=text if not text.isdecimal() else int(text)).ttl == count


@pytest.mark.parametrize(("name", "text"), [("ttl", "7 d"), ("ttl", "1.5h"), ("ttl", "-1d"), ("request_timeout", "2w"), ("port", "8m")])
def test_what_is_no_time_or_too_long_is_refused(name, text):
    with pytest.raises(InvalidOption, match=f"{name} is "):
        load_server({name: text}, {}, None)


def test_a_configuration_made_in_python_is_checked_and_fixed():
    with pytest.raises(InvalidOption, match="request_timeout is 0"):
        ServerConfig(request_timeout=0)
    with pytest.raises(InvalidOption, match="share_prefix is 'a'"):
        ServerConfig(share_prefix="a")
    with pytest.raises(FrozenInstanceError):
        ServerConfig().port = 1


def test_an_option_knows_what_it_takes():
    by_name = {option.name: option for option in (*options(), *options(ServerConfig))}
    assert kinds(by_name["api_key"]) == (tuple,)
    assert kinds(by_name["chat_template"]) == (str, type(None))
    assert kinds(by_name["log_level"]) == (str,)
    assert choices(by_name["metrics_compat"]) == ("none", "vllm")
    assert choices(by_name["port"]) == ()


@pytest.mark.parametrize("option", fields(ServerConfig), ids=lambda option: option.name)
def test_every_option_has_a_variable_and_a_sentence(option):
    word = {"log_level": "error", "metrics_compat": "vllm", "cors_origins": "*", "truncation": "auto"}.get(
        option.name, "on" if kinds(option) == (bool,) else "77"
    )
    _, server = load_server({}, {f"PANDO_{option.name.upper()}": word}, None)
    assert getattr(server, option.name) != option.default
    assert len(option.metadata["doc"]) > 20


def test_more_rows_run_on_a_gpu_unless_somebody_says_how_many() -> None:
    assert (EngineConfig().rows_on("cpu"), EngineConfig().rows_on("cuda")) == (64, 256)
    assert load({"max_num_seqs": "auto"}, {}, None) == EngineConfig()
    assert {EngineConfig(max_num_seqs=8).rows_on(device) for device in ("cpu", "cuda")} == {8}
