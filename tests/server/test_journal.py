"""The journal: every line is one record, whatever clients put into it."""

import io
import json
import logging
import logging.config
import re
import threading

import pytest

from pando.config import ServerConfig
from pando.server.journal import LEVELS, Journal, logging_config, request_id

NOW = 1_700_000_000.25
NASTY = 'a\nb\r\x1b[31mred\x00 "quoted" \u2028\u202e\x7f\ud800 ü'


class Screen(io.StringIO):
    def isatty(self):
        return True


def journal(stream=None, *arguments, **options):
    return Journal(io.StringIO() if stream is None else stream, *arguments, clock=lambda: NOW, **options)


def lines(made):
    return made._stream.getvalue().splitlines()


def records(made):
    return [json.loads(line) for line in lines(made)]


@pytest.fixture
def restored_loggers():
    names = ("uvicorn", "uvicorn.access", "asyncio", "opentelemetry")
    before = {
        name: (logging.getLogger(name).handlers[:], logging.getLogger(name).level, logging.getLogger(name).propagate) for name in names
    }
    yield
    for name, (handlers, level, propagate) in before.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_a_record_is_one_json_object_on_a_line():
    made = journal()
    made.info("started", port=8000, model="tiny")
    made.warning("slow", "req-1", seconds=1.23456789, ok=False, none=None, parts=[1, {"a": (2, 3)}])
    assert records(made) == [
        {"time": "2023-11-14T22:13:20.250Z", "level": "info", "event": "started", "port": 8000, "model": "tiny"},
        {
            "time": "2023-11-14T22:13:20.250Z",
            "level": "warning",
            "event": "slow",
            "request_id": "req-1",
            "seconds": 1.234568,
            "ok": False,
            "none": None,
            "parts": [1, {"a": [2, 3]}],
        },
    ]


def test_on_a_terminal_it_is_text_that_a_person_reads():
    made = journal(Screen())
    made.request("req-1", status=200, path="/v1/models", agent="curl 8")
    assert lines(made) == ['2023-11-14T22:13:20.250Z info request req-1 status=200 path=/v1/models agent="curl 8"']


@pytest.mark.parametrize("screen", [io.StringIO, Screen])
def test_what_a_client_sends_neither_begins_a_line_nor_steers_a_terminal(screen):
    made = journal(screen())
    made.info(NASTY, NASTY, agent=NASTY, nested={NASTY: [NASTY]})
    assert re.fullmatch(r"[ -~]+\n", made._stream.getvalue())
    made.error("failed", exception=ValueError(NASTY + "\n2023-11-14T22:13:20.250Z info forged"))
    text = made._stream.getvalue()
    assert re.fullmatch(r"[ -~\n]+", text)
    assert "\n2023-11-14T22:13:20.250Z info forged" not in text


def test_what_was_sent_can_be_read_back_exactly():
    made = journal()
    made.info("x", agent=NASTY)
    assert records(made)[0]["agent"] == NASTY


def test_fields_cannot_pose_as_the_time_or_the_level():
    made = journal()
    made.info("x", **{"time": "never", "level": "error", "more": 1})
    assert records(made) == [{"time": "2023-11-14T22:13:20.250Z", "level": "info", "event": "x", "more": 1}]


def test_words_of_people_are_left_out_unless_asked_for():
    words = {"prompt": "my secret", "messages": ["my secret"], "answer": "my secret", "tokens": 3}
    quiet, open_book = journal(), journal(prompts=True)
    quiet.request("r", **words)
    open_book.request("r", **words)
    assert "secret" not in lines(quiet)[0]
    assert records(quiet)[0]["tokens"] == 3
    assert records(open_book)[0]["prompt"] == "my secret"


def test_requests_can_be_left_out_and_the_rest_stays():
    made = Journal.from_config(ServerConfig(disable_log_requests=True), io.StringIO())
    made.request("r", status=200)
    made.info("started")
    assert [record["event"] for record in records(made)] == ["started"]


def test_records_below_the_level_are_left_out():
    made = Journal.from_config(ServerConfig(log_level="warning"), io.StringIO())
    for level in LEVELS:
        made.write(level, "x", "", {})
    assert [record["level"] for record in records(made)] == ["warning", "error"]


def test_an_exception_shows_where_it_came_from():
    made, screen = journal(), journal(Screen())
    for one in (made, screen):
        try:
            raise ValueError("wrong")
        except ValueError as error:
            one.error("failed", "r", exception=error)
    assert "test_journal.py" in records(made)[0]["exception"]
    head, *trace = lines(screen)
    assert head.endswith("error failed r")
    assert trace[-1] == "    ValueError: wrong"


class Unshowable:
    def __str__(self):
        raise RuntimeError("no")


def test_the_journal_never_raises():
    closed = io.StringIO()
    closed.close()
    journal(closed).info("x")
    loop = []
    loop.append(loop)
    made = journal()
    made.info("x", value=Unshowable())
    made.info("x", value=loop)
    made.info("numbers", nan=float("nan"), big=float("-inf"))
    assert records(made)[-1]["nan"] == "nan"


def test_lines_of_many_threads_stay_whole():
    made = journal()
    threads = [threading.Thread(target=lambda i=i: [made.info("x", i=i, pad="p" * 200) for _ in range(50)]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(records(made)) == 200


def test_what_uvicorn_logs_is_in_the_journal(restored_loggers):
    made = journal()
    logging.config.dictConfig(logging_config(made))
    logging.getLogger("uvicorn.error").info("Started on %s", "port 1\nforged")
    logging.getLogger("uvicorn.error").debug("not wanted")
    logging.getLogger("uvicorn.access").info("GET /secret")
    logging.getLogger("uvicorn.error").info("a %s too many", 1, 2)
    try:
        raise OSError("boom")
    except OSError:
        logging.getLogger("asyncio").exception("task failed")
    started, odd, failed = records(made)
    assert (started["event"], started["level"], started["message"]) == ("uvicorn", "info", "Started on port 1\nforged")
    assert odd["message"] == "a %s too many"
    assert (failed["event"], failed["level"]) == ("asyncio", "error")
    assert "OSError: boom" in failed["exception"]


def test_what_only_tells_of_progress_can_be_kept_back_until_it_is_wanted():
    made = journal()
    made.hold()
    made.info("loading")
    made.warning("slow")
    assert [record["event"] for record in records(made)] == ["slow"]
    made.release()
    made.info("ready")
    assert [record["event"] for record in records(made)] == ["slow", "loading", "ready"]
    detailed = journal(None, "debug")
    detailed.hold()
    detailed.info("loading")
    assert [record["event"] for record in records(detailed)] == ["loading"]


@pytest.mark.parametrize("given", ["abc", "A.b_c-9", "x" * 128])
def test_a_harmless_request_id_is_kept(given):
    assert request_id(given) == given


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "a\n", "ü", "a;b", '"', "\x1b[0m"])
def test_any_other_is_replaced_by_a_new_one(given):
    made = request_id(given)
    assert re.fullmatch("req-[0-9a-f]{32}", made)
    assert made != request_id(given)
