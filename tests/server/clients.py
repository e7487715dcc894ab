"""The official client, pointed at a live server; templates for its conversations; and a brake on the engine."""

import asyncio
import inspect
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
from pydantic import BaseModel

from pando.engine.engine import Engine
from pando.engine.request import TokenEvent

from ..tiny import tiny_model
from .live import NAME, Live, live

WAIT = 60.0  # seconds for what takes milliseconds on a machine with nothing else to do

# In the manner of Hermes: tools are described, calls and their results stand between tags.
HERMES_TEMPLATE = """
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call with <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}

{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""

# In the manner of Llama: a call is an object, and nothing marks it.
LLAMA_TEMPLATE = """
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call with {"name": function, "parameters": its arguments}
{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "strict": True}}


@contextmanager
def live_with_tools(folder: Path) -> Iterator[Live]:
    """A server whose chat template takes tools."""
    template = folder / "hermes.jinja"
    template.write_text(HERMES_TEMPLATE)
    with live(tiny_model(max_positions=1024), chat_template=str(template)) as server:
        yield server


@contextmanager
def client_of(server: Live, key: str = "none", **options: Any) -> Iterator[openai.OpenAI]:
    with openai.DefaultHttpxClient(verify=False) as http:  # nothing is encrypted, and to load certificates takes longer than an answer
        yield openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0, timeout=WAIT, http_client=http, **options)


class Awaited:
    """The asynchronous client, or a part of it, with the methods of the other one: what it makes is waited for at once."""

    def __init__(self, thing: Any, runner: asyncio.Runner) -> None:
        self._thing, self._runner = thing, runner

    def __getattr__(self, name: str) -> Any:
        return self._wrapped(getattr(self._thing, name))

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        made = self._thing(*arguments, **options)
        return self._wrapped(self._wait(made) if inspect.isawaitable(made) else made)

    def __iter__(self) -> Iterator[Any]:
        while (found := self._wait(anext(self._thing, None))) is not None:
            yield found

    def __enter__(self) -> "Awaited":
        return Awaited(self._wait(self._thing.__aenter__()), self._runner)

    def __exit__(self, *error: Any) -> None:
        self._wait(self._thing.__aexit__(*error))

    def _wait(self, awaitable: Any) -> Any:
        async def wait() -> Any:
            return await awaitable

        return self._runner.run(wait())

    def _wrapped(self, found: Any) -> Any:
        is_answer = isinstance(found, BaseModel) or not type(found).__module__.startswith("openai")
        return Awaited(found, self._runner) if callable(found) or not is_answer else found


@contextmanager
def each_client_of(server: Live, kind: str) -> Iterator[Any]:
    """The client that is named: sync or async."""
    if kind == "sync":
        with client_of(server) as client:
            yield client
        return
    with asyncio.Runner() as runner:
        client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=WAIT)
        yield Awaited(client, runner)
        runner.run(client.close())


def fetch(server: Live, path: str, body: Any = None, key: str = "none", **options: Any) -> httpx.Response:
    """For what the client has no method for."""
    options.setdefault("headers", {"authorization": f"Bearer {key}"})
    method = "GET" if body is None and "content" not in options else "POST"
    return httpx.request(method, server.url + path, json=body, timeout=WAIT, verify=False, **options)


def counters(server: Live, key: str = "none") -> dict[str, float]:
    """Every sample of /metrics, by its name with its labels."""
    lines = [line.rpartition(" ") for line in fetch(server, "/metrics", key=key).text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def said(*contents: str) -> list[dict[str, str]]:
    """A conversation in which user and assistant take turns."""
    return [{"role": ("user", "assistant")[place % 2], "content": content} for place, content in enumerate(contents)]


def ask(client: openai.OpenAI, *contents: str, **options: Any) -> Any:
    """The answer to such a conversation: the likeliest, and short."""
    return client.chat.completions.create(model=NAME, messages=said(*contents), **{"temperature": 0, "max_tokens": 8, **options})


def exactly(text: str) -> dict[str, Any]:
    """A response_format that leaves the model no choice: the text, in quotes."""
    return {"type": "json_schema", "json_schema": {"name": "exactly", "schema": {"const": text}}}


def quoted(text: str) -> str:
    return json.dumps(text)


class Brake:
    """The engine takes a step only when it is let."""

    def __init__(self, engine: Engine) -> None:
        self.steps = 0
        self._take = engine.step
        self._allowed = threading.Semaphore(0)
        engine.step = self._step  # type: ignore[method-assign]

    def _step(self) -> list[TokenEvent]:
        self._allowed.acquire()
        self.steps += 1
        return self._take()

    def let(self, steps: int) -> None:
        if steps:
            self._allowed.release(steps)


@contextmanager
def braked(server: Live) -> Iterator[Brake]:
    brake = Brake(server.service.loop._engine)
    try:
        yield brake
    finally:
        del server.service.loop._engine.step  # the class has it
        brake.let(1)  # which may wait already
        server.settle()


def wait_for(condition: Any) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)
