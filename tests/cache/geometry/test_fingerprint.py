from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import xxhash

from mlx_lm_kvpersist.cache.geometry.fingerprint import content_hash, local_path, model_fingerprint
from mlx_lm_kvpersist.errors import ModelNotSupported

CONFIG = {"rope_theta": 10000.0, "hidden_size": 8, "text_config": {"head_dim": 4}}
SHA256 = "ab" * 32


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**CONFIG, "model_file": "mine.py"}))
    for name in ("model-1.safetensors", "model-2.safetensors"):
        mx.save_safetensors(str(path / name), {"weight": mx.arange(64).astype(mx.float32)})
    (path / "tokenizer.json").write_text('{"vocab": {"a": 0}}')
    (path / "tokenizer_config.json").write_text("{}")
    return path


@pytest.fixture
def adapter_path(tmp_path: Path) -> Path:
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_config.json").write_text('{"rank": 8}')
    mx.save_safetensors(str(path / "adapters.safetensors"), {"lora_a": mx.ones((4,))})
    return path


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def set_config(path: Path, **values: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **values}, indent=4))


CHANGES: dict[str, Callable[[Path], Any]] = {
    "weight": lambda path: flip_last_byte(path / "model-2.safetensors"),
    "rope theta": lambda path: set_config(path, rope_theta=500000.0),
    "nested config": lambda path: set_config(path, text_config={"head_dim": 8}),
    "tokenizer": lambda path: (path / "tokenizer.json").write_text('{"vocab": {"b": 0}}'),
    "more tokenizer": lambda path: (path / "tokenizer.model").write_bytes(b"pieces"),
    "fewer weights": lambda path: (path / "model-1.safetensors").unlink(),
    "how weights are packed": lambda path: (path / "hf_quant_config.json").write_text("{}"),
    "its own code": lambda path: (path / "mine.py").write_text("class Model: pass"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_changes_the_kv_changes_the_fingerprint(
    model_path: Path, change: Callable[[Path], Any]
) -> None:
    before = model_fingerprint(model_path, None, content_hash)
    change(model_path)
    assert model_fingerprint(model_path, None, content_hash) != before


def test_what_does_not_change_the_kv_does_not(model_path: Path) -> None:
    before = model_fingerprint(model_path, None, content_hash)
    assert int(before, 16)
    set_config(model_path, transformers_version="9.9", _name_or_path="elsewhere")
    set_config(model_path, text_config={"head_dim": 4, "_name_or_path": "elsewhere"})
    (model_path / "tokenizer_config.json").write_text('{"chat_template": "another"}')
    (model_path / "README.md").write_text("hello")
    (model_path / "convert.py").write_text("print('made by me')")
    assert model_fingerprint(model_path, None, content_hash) == before
    moved = model_path.rename(model_path.with_name("moved"))
    assert model_fingerprint(moved, None, content_hash) == before


def test_an_adapter_makes_another_model(model_path: Path, adapter_path: Path) -> None:
    seen = {model_fingerprint(model_path, None, content_hash)}
    seen.add(model_fingerprint(model_path, adapter_path, content_hash))
    flip_last_byte(adapter_path / "adapters.safetensors")
    seen.add(model_fingerprint(model_path, adapter_path, content_hash))
    (adapter_path / "adapter_config.json").write_text('{"rank": 16}')
    seen.add(model_fingerprint(model_path, adapter_path, content_hash))
    assert len(seen) == 4
    before = model_fingerprint(model_path, adapter_path, content_hash)
    (adapter_path / "0000100_adapters.safetensors").write_bytes(b"a checkpoint")
    assert model_fingerprint(model_path, adapter_path, content_hash) == before


def test_the_given_hash_is_asked_once_a_file(model_path: Path) -> None:
    asked: list[str] = []

    def remember(path: Path) -> str:
        asked.append(path.name)
        return "0"

    model_fingerprint(model_path, None, remember)
    assert asked == ["model-1.safetensors", "model-2.safetensors", "tokenizer.json"]


def test_content_is_hashed_beyond_one_read(tmp_path: Path) -> None:
    path = tmp_path / "big"
    content = bytes(range(256)) * 40_000
    path.write_bytes(content)
    assert content_hash(path) == xxhash.xxh3_128(content).hexdigest()


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_model_of_the_hub_is_found_where_mlx_lm_downloaded_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_listed: bool
) -> None:
    """mlx-lm fetches only some files; huggingface_hub lists all, and calls the rest missing."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository, commit = tmp_path / "models--some--model", "c" * 40
    snapshot = repository / "snapshots" / commit
    for folder in (snapshot, repository / "refs", repository / "trees"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text("{}")
    if is_listed:
        entry = {"size": 2, "blob_id": "a" * 40}
        files = dict.fromkeys(("config.json", ".gitattributes", "README.md"), entry)
        listing = {"format_version": 1, "files": files}
        (repository / "trees" / f"{commit}.json").write_text(json.dumps(listing))
    assert local_path("some/model") == snapshot
    with pytest.raises(ModelNotSupported, match="other/model cannot be found"):
        local_path("other/model")


def hub_link(tmp_path: Path, blob: str, folder: str = "blobs") -> Path:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / blob).write_bytes(b"weights")
    link = tmp_path / "model.safetensors"
    link.symlink_to(tmp_path / folder / blob)
    return link


def test_a_hub_link_names_its_hash_and_is_not_read(tmp_path: Path) -> None:
    link = hub_link(tmp_path, SHA256)
    assert content_hash(link) == SHA256
    link.resolve().write_bytes(b"other")
    assert content_hash(link) == SHA256


@pytest.mark.parametrize(("blob", "folder"), [("ab" * 20, "blobs"), (SHA256, "elsewhere")])
def test_other_links_are_read(tmp_path: Path, blob: str, folder: str) -> None:
    link = hub_link(tmp_path, blob, folder)
    assert content_hash(link) == xxhash.xxh3_128(b"weights").hexdigest()


def test_what_is_missing_is_named(model_path: Path, adapter_path: Path) -> None:
    (adapter_path / "adapters.safetensors").unlink()
    with pytest.raises(ModelNotSupported, match=r"no adapters\.safetensors"):
        model_fingerprint(model_path, adapter_path, content_hash)
    (model_path / "config.json").write_text("{")
    with pytest.raises(ModelNotSupported, match="is not JSON"):
        model_fingerprint(model_path, None, content_hash)
    (model_path / "config.json").unlink()
    with pytest.raises(ModelNotSupported, match=r"no config\.json"):
        model_fingerprint(model_path, None, content_hash)
    with pytest.raises(ModelNotSupported, match=r"no \*\.safetensors weights"):
        model_fingerprint(adapter_path, None, content_hash)
