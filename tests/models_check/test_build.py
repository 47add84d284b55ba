"""The zoo's models are quick, repeatable, and depend on every part of a prompt."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from models_check.build import build
from models_check.configs import available
from models_check.conversation import random_ids
from models_check.drive import Row, alone

FAMILIES = {
    "llama": "KVCache",
    "gpt2": "KVCache",
    "mixtral": "KVCache",
    "deepseek_v3": "KVCache",
    "gemma3_text": "RotatingKVCache",
    "gemma4_text": "RotatingKVCache",
    "gpt_oss": "RotatingKVCache",
    "qwen3_next": "ArraysCache",
    "mamba2": "ArraysCache",
    "recurrent_gemma": "ArraysCache",
    "falcon_h1": "CacheList",
    "llama4": "ChunkedKVCache",
}
N_PROMPT = 90
EARLY, LATE = (1, 3, 5, 8), (70, 80, 85)


def last_logits(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    logits = np.array(model(mx.array([ids]), cache=make_prompt_cache(model))[0, -1])
    return np.where(np.isfinite(logits), logits, 0.0)


def influence(model: Any, ids: list[int], positions: tuple[int, ...]) -> float:
    """Return the largest relative change of the last logits if one of these tokens changes."""
    before = last_logits(model, ids)
    changes = []
    for position in positions:
        changed = [*ids[:position], (ids[position] + 17) % 250, *ids[position + 1 :]]
        changes.append(np.abs(last_logits(model, changed) - before).max())
    return float(max(changes) / np.abs(before).max())


def check_influence(name: str) -> None:
    model = build(name)
    ids = random_ids(0, N_PROMPT)
    assert influence(model, ids, EARLY) > 0.002
    assert influence(model, ids, LATE) > 0.002
    reply = alone(model, Row([ids], make_prompt_cache(model), n_new=40)).ids
    assert len(set(reply)) >= 10, reply


@pytest.mark.parametrize("name", FAMILIES)
def test_early_and_late_tokens_change_the_logits(name: str) -> None:
    check_influence(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in available() if name not in FAMILIES])
def test_early_and_late_tokens_change_the_logits_of_every_model(name: str) -> None:
    check_influence(name)


@pytest.mark.parametrize(("name", "cache"), FAMILIES.items())
def test_each_family_has_its_expected_cache_class(name: str, cache: str) -> None:
    assert cache in {type(cache).__name__ for cache in make_prompt_cache(build(name))}


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3_next", "kimi_linear"])
def test_the_same_seed_gives_the_same_weights(name: str) -> None:
    first, again, other = (dict(tree_flatten(build(name, seed).parameters())) for seed in (0, 0, 1))
    assert all(mx.array_equal(first[path], again[path]) for path in first)
    assert not all(mx.array_equal(first[path], other[path]) for path in first)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_has_few_parameters(name: str) -> None:
    """A forward pass then takes milliseconds."""
    assert sum(value.size for _, value in tree_flatten(build(name).parameters())) < 1_000_000
