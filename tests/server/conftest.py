"""A server for the tests of several APIs: its replies are written by the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import StartServer
from tests.support.scripted import ScriptedServer, make_thinking_model


@pytest.fixture(scope="session")
def scripted_server(
    models_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ScriptedServer]:
    """A tiny model with tools and thinking, for tests of one session, one after another."""
    folder = tmp_path_factory.mktemp("scripted")
    start = StartServer(folder)
    try:
        yield ScriptedServer(start, make_thinking_model(models_dir / "thinking-tools"), folder)
    finally:
        start.close()
