"""The server and the client of a file's tests. A file whose server has options of its own makes it itself."""

from collections.abc import Iterator

import openai
import pytest

from .clients import client_of
from .live import Live, live


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client
