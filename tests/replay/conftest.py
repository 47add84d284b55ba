"""A replayer for each test, with its own store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlx_lm_kvpersist.cli.quality_checks import server_attention

from .replayer import Replayer

MakeReplayer = Callable[..., Replayer]


@pytest.fixture(autouse=True, scope="package")
def patched() -> Iterator[None]:
    with server_attention():
        yield


@pytest.fixture
def make_replayer(tmp_path: Path) -> Iterator[MakeReplayer]:
    """Return make(model, *options); the store closes with the test."""
    made: list[Replayer] = []

    def make(model: Path, *options: str) -> Replayer:
        made.append(Replayer(model, tmp_path / f"store-{len(made)}", *options))
        return made[-1]

    yield make
    for replayer in made:
        replayer.close()


@pytest.fixture
def replayer(make_replayer: MakeReplayer, tiny_model: Path) -> Replayer:
    """A replayer with a byte-level tokenizer, ChatML and tools, without thinking."""
    return make_replayer(tiny_model)
