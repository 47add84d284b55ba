"""The smallest possible models, and their replies without a store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_lm_kvpersist.request.model import LoadedModel

from .driving import Cold, Talk, load_model, talk_with


@pytest.fixture(scope="session")
def loaded(models_dir: Path) -> LoadedModel:
    return load_model(models_dir / "attacked")


@pytest.fixture(scope="session")
def other_weights(models_dir: Path) -> LoadedModel:
    """A model with the same geometry and, wrongly, the same fingerprint, but other weights."""
    return load_model(models_dir / "other-weights", seed=1)


@pytest.fixture(scope="session")
def cold(loaded: LoadedModel) -> Cold:
    return Cold(loaded)


@pytest.fixture
def talk(loaded: LoadedModel, tmp_path: Path) -> Iterator[Talk]:
    with talk_with(loaded, tmp_path / "store") as talk:
        yield talk
