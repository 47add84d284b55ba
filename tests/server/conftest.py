"""A server for the tests of several APIs; each test determines its replies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import StartServer
from tests.support.scripted import ScriptedServer, make_thinking_model

MAX_CONTEXT = 8192


@pytest.fixture(scope="session")
def scripted_server(
    models_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ScriptedServer]:
    """A tiny model with tools and thinking, for tests that run one after another."""
    folder = tmp_path_factory.mktemp("scripted")
    start = StartServer(folder)
    config = {"max_position_embeddings": MAX_CONTEXT}
    model = make_thinking_model(models_dir / "thinking-tools", config=config)
    try:
        yield ScriptedServer(start, model, folder)
    finally:
        start.close()
