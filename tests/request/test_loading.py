"""A model that was loaded is made ready: the same bits on every start, and nothing measured."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvpersist.config import KV_BITS
from mlx_lm_kvpersist.store.block_store import BlockStore
from tests.support.host import patched_attention

from .conftest import prepared, provider_of, store_in


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return provider_of(tmp_path_factory.mktemp("model"), n_layers=4)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    made = store_in(tmp_path / "store")
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def patched() -> Iterator[None]:
    """Stock's attention cannot take keys and values of unlike precisions."""
    with patched_attention():
        yield


@pytest.mark.parametrize(
    ("bits", "layout", "words"),
    [
        ("default", "k8v4b64*1,k6v4b64*2,k8v4b64*1,c256", "keys 6 to 8 bits, values 4 ("),
        ("k6v4", "k6v4b64,c256", "keys 6 bits, values 4 ("),
        ("16", "full", "full precision;"),
    ],
)
def test_the_first_and_the_last_layer_have_more_bits_by_default(
    provider: Any,
    store: BlockStore,
    caplog: pytest.LogCaptureFixture,
    bits: str,
    layout: str,
    words: str,
) -> None:
    caplog.set_level(logging.INFO)
    loaded = prepared(provider, store, KV_BITS[bits]).model
    assert loaded.spec.layout == loaded.root.layout == layout
    assert words in caplog.text
