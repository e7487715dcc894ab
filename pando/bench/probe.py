"""Getting to know a server before it is measured: its model, what it accepts, and how many tokens a word has for it."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import httpx

from ..errors import InvalidOption
from .client import Client, Reply, Target
from .traffic import Source

GREETING_SECONDS = 10.0
FEW, MANY = 32, 128  # words of the two prompts that are compared
FEWEST = 0.1  # tokens per word
REFUSALS = ("HTTP 400", "HTTP 422")
HARMLESS = ("empty answer",)  # its one token may make no text


async def first_model(http: httpx.AsyncClient, url: str) -> str:
    body = await _get(http, url, "/v1/models")
    try:
        return str(body["data"][0]["id"])
    except (TypeError, LookupError) as error:
        raise InvalidOption(f"{url}/v1/models names no model; name one with --model") from error


async def _get(http: httpx.AsyncClient, url: str, path: str) -> Any:
    """The JSON there, or None where there is none."""
    try:
        response = await http.get(url + path, timeout=GREETING_SECONDS)
    except httpx.RequestError as error:
        raise InvalidOption(unreachable(url, str(error) or type(error).__name__)) from error
    if response.status_code in (401, 403):
        wanted = "another key" if "authorization" in http.headers else "a key"
        raise InvalidOption(f"{url} answers {response.status_code}: it wants {wanted}; give one with --api-key")
    try:
        return response.json() if response.status_code == 200 else None
    except ValueError:
        return None


def unreachable(url: str, why: str) -> str:
    return f"no server answers at {url} ({why}); start one, or name another with --url"


async def version(http: httpx.AsyncClient, url: str) -> str:
    try:
        body = await _get(http, url, "/version")
    except InvalidOption:  # no reason not to measure it
        return "unknown"
    return str(body.get("version", "unknown"))[:100] if isinstance(body, dict) else "unknown"


async def acquaint(http: httpx.AsyncClient, target: Target, source: Source, seed: str) -> tuple[Target, Source, str]:
    """The target as it wants to be asked, the source with its tokens per word, and where that number is from."""
    random = Random(f"{seed} probe")
    accepted, few = await _accepted(http, target, source.cut(FEW, random))
    many = await Client(http, accepted).ask([{"role": "user", "content": source.cut(MANY, random)}], 1)
    if few.prompt_tokens is None or many.prompt_tokens is None:
        return accepted, source, "assumed: two requests told no usage"
    measured = max(FEWEST, (many.prompt_tokens - few.prompt_tokens) / (MANY - FEW))
    return accepted, replace(source, tokens_per_word=measured), "measured by two requests"


async def _accepted(http: httpx.AsyncClient, target: Target, text: str) -> tuple[Target, Reply]:
    reply = None
    for candidate in _candidates(target):
        reply = await Client(http, candidate).ask([{"role": "user", "content": text}], 1)
        failure = reply.failure
        if failure is None or failure.reason in HARMLESS:
            return candidate, reply
        if failure.reason not in REFUSALS:
            break
    assert reply is not None and reply.failure is not None
    if reply.failure.reason == "no connection":
        raise InvalidOption(unreachable(target.url, reply.failure.detail))
    said = f": {reply.failure.detail}" if reply.failure.detail else ""
    raise InvalidOption(f"the first request to {target.url} failed ({reply.failure.reason}{said}); nothing was measured")


def _candidates(target: Target) -> Iterator[Target]:
    """From all that is wanted to what every server takes."""
    for usage in (target.usage, False):
        for ignore_eos in (True, False) if target.ignore_eos else (False,):
            yield replace(target, usage=usage, ignore_eos=ignore_eos)
