"""Fingerprint a model by what decides its KV: config, weights, code, tokenizer, adapter."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import xxhash
from huggingface_hub import try_to_load_from_cache

from ...errors import ModelNotSupported

_VOLATILE_KEYS = {"_name_or_path", "transformers_version"}
"""Keys of config.json that do not change what the model computes."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
_QUANTIZATION = "hf_quant_config.json"
"""mlx-lm reads from it how weights are packed that NVIDIA's ModelOpt made."""
_READ_BYTES = 8 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


def model_fingerprint(
    model_path: Path, adapter_path: Path | None, hash_file: Callable[[Path], str]
) -> str:
    """Return a hex digest that two models share only if equal ids give equal KV in both.

    `hash_file` returns a file's content hash, as `content_hash` does.

    Raises:
        ModelNotSupported: a folder has no config or no weights, or the config is not JSON.
        OSError: a file cannot be read.
    """
    weights = sorted(model_path.glob("*.safetensors"))
    if not weights:
        raise ModelNotSupported(f"no *.safetensors weights in {model_path}")
    config = _config(model_path / "config.json")
    parts: dict[str, Any] = {
        "config": config,
        "weights": {path.name: hash_file(path) for path in weights},
        "tokenizer": {
            name: hash_file(model_path / name)
            for name in _TOKENIZER_FILES
            if (model_path / name).is_file()
        },
    }
    # A model may bring code of its own, which mlx-lm runs in place of its own class.
    others = _QUANTIZATION, config.get("model_file") if isinstance(config, dict) else None
    for name in filter(None, others):
        if (path := model_path / name).is_file():
            parts[name] = hash_file(path)
    if adapter_path is not None:
        # mlx-lm loads this file only; the others in the folder are checkpoints of the training.
        adapter = adapter_path / "adapters.safetensors"
        if not adapter.is_file():
            raise ModelNotSupported(f"no adapters.safetensors in {adapter_path}")
        parts["adapter"] = {
            "config": _config(adapter_path / "adapter_config.json"),
            "weights": hash_file(adapter),
        }
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def local_path(model: str) -> Path:
    """Return the folder of a model that has been loaded: a path, or a repository in the cache."""
    path = Path(model)
    if path.exists():
        return path
    # Not `snapshot_download`: it raises where a file is missing that mlx-lm does not download.
    config = try_to_load_from_cache(model, "config.json")
    if not isinstance(config, str):
        raise ModelNotSupported(f"the files of model {model} cannot be found on this machine")
    return Path(config).parent


def content_hash(path: Path, on_read: Callable[[int], None] = lambda n_bytes: None) -> str:
    """Return a hex hash of a file's content: its sha256 in a hub cache, else xxh3_128.

    In a Hugging Face hub cache a file is a link to `blobs/<sha256>`, so it is not read. `on_read`
    is called with the size of each piece that was.

    Raises:
        OSError: the file cannot be read.
    """
    if known := _hash_in_name(path):
        return known
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
            on_read(len(chunk))
    return digest.hexdigest()


def is_quickly_hashed(path: Path) -> bool:
    """Say whether a file is small, or need not be read. Raises OSError where it is not there."""
    return path.stat().st_size <= _READ_BYTES or bool(_hash_in_name(path))


def _hash_in_name(path: Path) -> str | None:
    if path.is_symlink():
        target = path.resolve(strict=True)
        if target.parent.name == "blobs" and _SHA256.fullmatch(target.name):
            return target.name
    return None


def _config(path: Path) -> Any:
    def without_volatile(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: value for key, value in pairs if key not in _VOLATILE_KEYS}

    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=without_volatile)
    except FileNotFoundError:
        raise ModelNotSupported(f"no {path.name} in {path.parent}") from None
    except ValueError as error:
        raise ModelNotSupported(f"{path} is not JSON: {error}") from error


class Persisted(Protocol):
    """JSON values by key that outlive the process; the store implements it.

    A key names all that a value depends on, and the format of the value. So a result for another
    device, or in another format, is not found.
    """

    def get(self, key: str) -> Any:
        """Return a value; None where there is none, or none that can be read."""

    def put(self, key: str, value: Any) -> None:
        """Write a value, in place of any before."""


def hash_once(persisted: Persisted, path: Path, read: Callable[[Path], str] = content_hash) -> str:
    """Hash a file once: weights are gigabytes, and when they change, so does their stamp."""
    stat = path.stat()
    stamp = f"{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}"
    match persisted.get(f"hash/{path}"):
        case [str(then), str(known)] if then == stamp:
            return known
    found = read(path)
    persisted.put(f"hash/{path}", [stamp, found])
    return found
