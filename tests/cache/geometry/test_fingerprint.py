from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import xxhash

from mlx_lm_kvpersist.cache.geometry.fingerprint import content_hash, local_path, model_fingerprint
from mlx_lm_kvpersist.errors import ModelNotSupported

CONFIG = {"rope_theta": 10000.0, "hidden_size": 8, "text_config": {"head_dim": 4}}
SHA256 = "ab" * 32
MIB = 1 << 20
SAMPLE = 4 << 10
SIZES = (2, 100, SAMPLE, SAMPLE + 1, MIB, 30 * MIB, 0, 8, 2 * MIB)
"""Bytes of the tensors of a file that is too large to be hashed whole."""


def write_weights(path: Path, sizes: Sequence[int] = SIZES) -> int:
    """Write a sparse file of safetensors that are all zeros; return the offset of the tensors.

    https://github.com/huggingface/safetensors#format
    """
    header, stop = dict[str, Any](__metadata__={"format": "mlx"}), 0
    for number, size in enumerate(sizes):
        entry = {"dtype": "U8", "shape": [size], "data_offsets": [stop, stop + size]}
        header[f"layers.{number:03d}.weight"], stop = entry, stop + size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + stop)
    return 8 + len(text)


def overwrite(path: Path, start: int, content: bytes) -> None:
    """Replace bytes in place; the file's size and time stay the same."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(start)
        file.write(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**CONFIG, "model_file": "mine.py"}))
    for number in (1, 2):
        weights = {"weight": number * mx.arange(64).astype(mx.float32)}
        mx.save_safetensors(str(path / f"model-{number}.safetensors"), weights)
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


def swap_contents(path: Path, other: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


def set_config(path: Path, **values: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **values}, indent=4))


CHANGES: dict[str, Callable[[Path], Any]] = {
    "weight": lambda path: flip_last_byte(path / "model-2.safetensors"),
    "swapped weights": lambda path: swap_contents(*path.glob("*.safetensors")),
    "rope theta": lambda path: set_config(path, rope_theta=500000.0),
    "nested config": lambda path: set_config(path, text_config={"head_dim": 8}),
    "tokenizer": lambda path: (path / "tokenizer.json").write_text('{"vocab": {"b": 0}}'),
    "second tokenizer file": lambda path: (path / "tokenizer.model").write_bytes(b"pieces"),
    "fewer weights": lambda path: (path / "model-1.safetensors").unlink(),
    "quantization config": lambda path: (path / "hf_quant_config.json").write_text("{}"),
    "model code": lambda path: (path / "mine.py").write_text("class Model: pass"),
}


@pytest.mark.parametrize("change_files", CHANGES.values(), ids=CHANGES.keys())
def test_files_that_affect_kv_change_the_fingerprint(
    model_path: Path, change_files: Callable[[Path], Any]
) -> None:
    (model_path / "mine.py").write_text("class Model: ...")
    before = model_fingerprint(model_path, None)
    change_files(model_path)
    assert model_fingerprint(model_path, None) != before


def test_files_that_do_not_affect_kv_keep_the_fingerprint(model_path: Path) -> None:
    before = model_fingerprint(model_path, None)
    assert int(before, 16)
    set_config(model_path, transformers_version="9.9", _name_or_path="elsewhere")
    set_config(model_path, text_config={"head_dim": 4, "_name_or_path": "elsewhere"})
    (model_path / "tokenizer_config.json").write_text('{"chat_template": "another"}')
    (model_path / "README.md").write_text("hello")
    (model_path / "convert.py").write_text("print('made by me')")
    assert model_fingerprint(model_path, None) == before
    moved = model_path.rename(model_path.with_name("moved"))
    assert model_fingerprint(moved, None) == before


def test_adapters_change_the_fingerprint(model_path: Path, adapter_path: Path) -> None:
    fingerprints = {model_fingerprint(model_path, None)}
    fingerprints.add(model_fingerprint(model_path, adapter_path))
    flip_last_byte(adapter_path / "adapters.safetensors")
    fingerprints.add(model_fingerprint(model_path, adapter_path))
    (adapter_path / "adapter_config.json").write_text('{"rank": 16}')
    fingerprints.add(model_fingerprint(model_path, adapter_path))
    assert len(fingerprints) == 4
    before = model_fingerprint(model_path, adapter_path)
    (adapter_path / "0000100_adapters.safetensors").write_bytes(b"a checkpoint")
    assert model_fingerprint(model_path, adapter_path) == before


def test_small_files_are_hashed_as_a_whole(tmp_path: Path) -> None:
    """The hub names every larger file by its SHA-256."""
    path = tmp_path / "tokenizer.json"
    content = bytes(range(256)) * 40_000
    path.write_bytes(content)
    assert content_hash(path) == xxhash.xxh3_128(content).hexdigest()


def test_equal_large_files_have_equal_hashes(tmp_path: Path) -> None:
    """The file's folder, name and time do not count."""
    path, other = tmp_path / "model.safetensors", tmp_path / "other" / "copy.safetensors"
    other.parent.mkdir()
    start = write_weights(path)
    overwrite(path, start + 5 * MIB, b"\1" * 7 * MIB)
    shutil.copy(path, other)
    os.utime(other, (1, 1))
    assert content_hash(path) == content_hash(other)


@pytest.mark.parametrize("number", [number for number, size in enumerate(SIZES) if size])
def test_changing_one_tensor_changes_the_hash(tmp_path: Path, number: int) -> None:
    """Even for a small tensor, and if the file's size and time stay the same."""
    path = tmp_path / "model.safetensors"
    start = write_weights(path) + sum(SIZES[:number])
    before = content_hash(path)
    overwrite(path, start, b"\1" * SIZES[number])
    assert content_hash(path) != before


@pytest.mark.parametrize("expert", range(0, 256, 37))
def test_changing_one_expert_in_all_layers_changes_the_hash(tmp_path: Path, expert: int) -> None:
    """Each of 512 tensors stacks 256 experts."""
    path = tmp_path / "model.safetensors"
    start = write_weights(path, 512 * [MIB])
    before = content_hash(path)
    for layer in range(512):
        overwrite(path, start + layer * MIB + expert * SAMPLE, b"\1" * SAMPLE)
    assert content_hash(path) != before


@pytest.mark.parametrize("share", [0.0, 0.2, 0.51, 0.77, 1.0])
@pytest.mark.parametrize("suffix", ["safetensors", "json"])
def test_changing_a_sixtieth_of_a_file_changes_the_hash(
    tmp_path: Path, share: float, suffix: str
) -> None:
    path = tmp_path / f"file.{suffix}"
    write_weights(path, [40 * MIB])
    n_bytes, before = path.stat().st_size, content_hash(path)
    n_changed = n_bytes // 60
    overwrite(path, round(share * (n_bytes - n_changed)), b"\1" * n_changed)
    assert content_hash(path) != before


@pytest.mark.parametrize("position", ["first", "last"])
def test_changing_the_first_or_last_tensor_byte_changes_the_hash(
    tmp_path: Path, position: str
) -> None:
    path = tmp_path / "model.safetensors"
    start = write_weights(path)
    before = content_hash(path)
    overwrite(path, start if position == "first" else path.stat().st_size - 1, b"\1")
    assert content_hash(path) != before


def test_changing_the_header_or_file_size_changes_the_hash(tmp_path: Path) -> None:
    """All bytes of the tensors are zero."""
    path = tmp_path / "model.safetensors"
    start = write_weights(path, 512 * [MIB])
    hashes = {content_hash(path)}
    with path.open("rb") as file:
        name = file.read(start).index(b"layers.300")
    assert SAMPLE < name < start - SAMPLE
    overwrite(path, name, b"layers.999")
    hashes.add(content_hash(path))
    os.truncate(path, path.stat().st_size + SAMPLE)
    assert len(hashes | {content_hash(path)}) == 3


class CountedFile(io.FileIO):
    """A file that counts the bytes read from all files of this class."""

    n_bytes = 0

    def read(self, size: int | None = -1) -> bytes:
        content = super().read(-1 if size is None else size)
        CountedFile.n_bytes += len(content)
        return content


def n_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many bytes of a file are read for its hash."""
    with monkeypatch.context() as counting:
        counting.setattr(Path, "open", lambda path, mode, **how: CountedFile(path, mode))
        counting.setattr(CountedFile, "n_bytes", 0)
        content_hash(path)
        return CountedFile.n_bytes


def test_hashing_a_larger_file_reads_no_more_tensor_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, counts = tmp_path / "model.safetensors", list[int]()
    for n_bytes in (20 * MIB, 20 << 30):
        counts.append(-write_weights(path, 8 * [n_bytes // 8]))
        counts[-1] += n_read(path, monkeypatch)
    assert counts[0] == counts[1] <= (8 + 64) * SAMPLE


@pytest.mark.parametrize(
    "head", [b"", b"\xff" * 64, b"\x02" + bytes(7) + b"[]", b"\x09" + bytes(7) + b'{"a": {}}']
)
def test_a_large_file_without_a_header_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    """mlx-lm does not load every file with this suffix."""
    path = tmp_path / "other.safetensors"
    path.write_bytes(head)
    os.truncate(path, 20 * MIB)
    assert n_read(path, monkeypatch) < MIB


def test_unreadable_weight_files_raise_an_error(model_path: Path) -> None:
    weights = model_path / "model-1.safetensors"
    weights.unlink()
    with pytest.raises(FileNotFoundError):
        content_hash(weights)
    weights.symlink_to(model_path / "gone")
    with pytest.raises(FileNotFoundError):
        model_fingerprint(model_path, None)
    weights.unlink()
    weights.mkdir()
    with pytest.raises(IsADirectoryError):
        model_fingerprint(model_path, None)


@pytest.mark.parametrize("is_listed", [False, True])
def test_hub_model_is_found_in_the_download_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_listed: bool
) -> None:
    """mlx-lm downloads some files; huggingface_hub reports the other listed files as missing."""
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


def test_hub_link_names_its_hash_and_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = hub_link(tmp_path, SHA256)
    assert content_hash(link) == SHA256 and n_read(link, monkeypatch) == 0
    link.resolve().write_bytes(b"other")
    assert content_hash(link) == SHA256


def test_hub_model_keeps_the_fingerprint_of_earlier_versions(tmp_path: Path) -> None:
    """Conversations must be found after an upgrade. The hub has no SHA-256 of small files."""
    hub_link(tmp_path, SHA256)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    parts = {
        "config": CONFIG,
        "tokenizer": {"tokenizer.json": xxhash.xxh3_128(b"{}").hexdigest()},
        "weights": {"model.safetensors": SHA256},
    }
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    assert model_fingerprint(tmp_path, None) == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(("blob", "folder"), [("ab" * 20, "blobs"), (SHA256, "elsewhere")])
def test_links_outside_the_hub_format_are_hashed_by_content(
    tmp_path: Path, blob: str, folder: str
) -> None:
    link = hub_link(tmp_path, blob, folder)
    assert content_hash(link) == xxhash.xxh3_128(b"weights").hexdigest()


def test_errors_name_the_missing_or_invalid_file(model_path: Path, adapter_path: Path) -> None:
    (adapter_path / "adapters.safetensors").unlink()
    with pytest.raises(ModelNotSupported, match=r"no adapters\.safetensors"):
        model_fingerprint(model_path, adapter_path)
    (model_path / "config.json").write_text("{")
    with pytest.raises(ModelNotSupported, match="is not JSON"):
        model_fingerprint(model_path, None)
    (model_path / "config.json").unlink()
    with pytest.raises(ModelNotSupported, match=r"no config\.json"):
        model_fingerprint(model_path, None)
    with pytest.raises(ModelNotSupported, match=r"no \*\.safetensors weights"):
        model_fingerprint(adapter_path, None)
