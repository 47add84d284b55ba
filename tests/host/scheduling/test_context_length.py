"""The context length in a model's files; if it is uncertain, prompts have no limit."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.host.scheduling.model_provider import length_of, max_context

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
LINEAR = {"type": "linear", "original_max_position_embeddings": None}
LONGROPE = {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"n_positions": 1024, "n_ctx": 1024}, 1024),
        ({"max_seq_len": 2048}, 2048),
        ({"max_position_embeddings": 131072, "rope_scaling": LLAMA3}, 131072),
        ({"max_position_embeddings": 32768, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4}}, 16384),
        ({"max_position_embeddings": 131072, "rope_scaling": LONGROPE}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": {**LONGROPE, "factor": 32}}, 131072),
        (
            {"max_position_embeddings": 131072, "rope_scaling": {"type": "yarn", "factor": 4}},
            131072,
        ),
        ({"max_position_embeddings": 32768, "rope_scaling": {**YARN, "factor": None}}, 32768),
        ({"max_position_embeddings": 4096, "rope_scaling": {**LINEAR, "factor": 4}}, 16384),
        ({"max_position_embeddings": 4096, "rope_scaling": "linear"}, 4096),
        ({"max_position_embeddings": 40960, "rope_scaling": None}, 40960),
        ({"max_position_embeddings": 32768, "rope_parameters": YARN}, 131072),
        ({"vision_config": {"max_position_embeddings": 77}}, None),
        ({"text_config": {"max_position_embeddings": 32768}, "seq_length": None}, 32768),
        ({"text_config": [1]}, None),
        ({"model_type": "mamba"}, None),
        ({"max_position_embeddings": None}, None),
        ({"max_position_embeddings": 0}, None),
        ({"max_position_embeddings": True}, None),
        ({"max_position_embeddings": "long"}, None),
        ({"max_position_embeddings": 10**30}, None),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear"}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"factor": 0.5, "type": "x"}}, 4096),
    ],
)
def test_context_length_is_read_from_a_configuration(
    config: dict[str, Any], length: int | None
) -> None:
    assert length_of(config) == length


def write(folder: Path, text: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    ("config_length", "tokenizer_length", "expected"),
    [
        (32768, 131072, 131072),  # Qwen2.5: the first length is without rope scaling
        (32768, 2048, 32768),  # the tokenizer's length is left over from training
        (8192, int(1e30), 8192),
        (8192, None, 8192),
        (None, 2048, None),  # a recurrent model with another model's tokenizer
    ],
)
def test_larger_length_of_configuration_and_tokenizer_is_used(
    tmp_path: Path, config_length: int | None, tokenizer_length: int | None, expected: int | None
) -> None:
    model = write(tmp_path, json.dumps({"max_position_embeddings": config_length}))
    assert max_context(model, SimpleNamespace(model_max_length=tokenizer_length)) == expected


ENDLESS = '{"n_ctx": 8, "rope_scaling": {"type": "linear", "factor": 1e999}}'


@pytest.mark.parametrize("text", ["{bad", "[]", "5", "\xff", ENDLESS])
def test_unreadable_configuration_gives_no_limit(tmp_path: Path, text: str) -> None:
    assert max_context(write(tmp_path, text), SimpleNamespace()) is None
    assert max_context(str(tmp_path / "none"), SimpleNamespace()) is None
    assert max_context("no/such/name/at all", SimpleNamespace()) is None


def test_configuration_is_read_from_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / "0a"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0a")
    write(snapshot, '{"max_position_embeddings": 512}')
    assert max_context("some/model", SimpleNamespace()) == 512
    assert max_context("some/other", SimpleNamespace()) is None
