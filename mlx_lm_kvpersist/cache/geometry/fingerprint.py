"""Fingerprint a model by what determines its KV: config, weights, code, tokenizer, adapter."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import xxhash
from huggingface_hub import try_to_load_from_cache

from ...errors import ModelNotSupported

_VOLATILE_KEYS = {"_name_or_path", "transformers_version"}
"""Keys of config.json that do not affect what the model computes."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
_QUANTIZATION = "hf_quant_config.json"
"""mlx-lm reads from this file how weights made by NVIDIA's ModelOpt are packed."""
_WHOLE_BYTES = 16 << 20
"""A file up to this size is read completely."""
_SAMPLE_BYTES = 4 << 10
_N_SPREAD = 64
"""A larger file has this number of evenly spread samples, and one sample of each tensor."""
_GOLDEN = 40503
"""2**16 divided by the golden ratio: its multiples, modulo 2**16, are spread evenly."""
_MAX_HEADER_BYTES = 100_000_000
"""The longest header that the safetensors format allows."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


def model_fingerprint(model_path: Path, adapter_path: Path | None) -> str:
    """Return a hex digest of all files of a model, and of its adapter, that determine its KV.

    Large files are sampled: `content_hash` says which changes are noticed. Raises OSError, and
    ModelNotSupported if a folder has no config or no weights, or the config is not JSON.
    """
    weights = sorted(model_path.glob("*.safetensors"))
    if not weights:
        raise ModelNotSupported(f"no *.safetensors weights in {model_path}")
    config = _config(model_path / "config.json")
    content: dict[str, Any] = {
        "config": config,
        "weights": {path.name: content_hash(path) for path in weights},
        "tokenizer": {
            name: content_hash(model_path / name)
            for name in _TOKENIZER_FILES
            if (model_path / name).is_file()
        },
    }
    # A model's folder may contain code that mlx-lm runs instead of a class of mlx-lm.
    more_names = _QUANTIZATION, config.get("model_file") if isinstance(config, dict) else None
    for name in filter(None, more_names):
        if (path := model_path / name).is_file():
            content[name] = content_hash(path)
    if adapter_path is not None:
        # mlx-lm loads this file only; other files in the folder are checkpoints of the training.
        adapter = adapter_path / "adapters.safetensors"
        if not adapter.is_file():
            raise ModelNotSupported(f"no adapters.safetensors in {adapter_path}")
        content["adapter"] = {
            "config": _config(adapter_path / "adapter_config.json"),
            "weights": content_hash(adapter),
        }
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def local_path(model: str) -> Path:
    """Return the folder of a loaded model. `model` is a path, or a repository of the hub."""
    path = Path(model)
    if path.exists():
        return path
    # Not `snapshot_download`: it raises if files are missing, and mlx-lm does not download all.
    config = try_to_load_from_cache(model, "config.json")
    if not isinstance(config, str):
        raise ModelNotSupported(f"the files of model {model} cannot be found on this machine")
    return Path(config).parent


def content_hash(path: Path) -> str:
    """Return a hash of a file. Of a large file, only the header and samples are read.

    In a Hugging Face hub cache, a large file is a link to `blobs/<sha256>`; the hash is this name.
    The hash of any other file up to 16 MiB is the hex xxh3_128 of its content. The hash of a larger
    file is its size and the hex xxh3_128 of header and samples. Raises OSError if the file cannot
    be read.

    For a larger safetensors file of N bytes, the hash always changes with the size or the header.
    The hash also changes if every byte of a tensor changes, or more than N / 63 adjacent bytes. If
    n adjacent bytes change, the hash changes with a probability of about 64 (n + 4096) / N.
    """
    if path.is_symlink():
        target = path.resolve(strict=True)
        if target.parent.name == "blobs" and _SHA256.fullmatch(target.name):
            return target.name
    n_bytes = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        if n_bytes <= _WHOLE_BYTES:
            return xxhash.xxh3_128(file.read()).hexdigest()
        digest = xxhash.xxh3_128()
        header = _header(file) if path.suffix == ".safetensors" else b""
        digest.update(header)
        last = n_bytes - _SAMPLE_BYTES
        spread = (last * number // (_N_SPREAD - 1) for number in range(_N_SPREAD))
        for start in sorted({*spread, *_tensor_places(header)}):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
    return f"{n_bytes}-{digest.hexdigest()}"


def _header(file: BinaryIO) -> bytes:
    """Return 8 bytes of length, then JSON: https://github.com/huggingface/safetensors#format"""
    size = file.read(8)
    n_bytes = int.from_bytes(size, "little")
    return size + file.read(n_bytes) if n_bytes <= _MAX_HEADER_BYTES else size


def _tensor_places(header: bytes) -> Iterator[int]:
    """Yield the offset in the file at which each tensor's sample begins.

    The offset within a tensor differs from tensor to tensor, so the samples of stacked experts are
    not all of the same expert. An invalid header is not an error, because mlx-lm does not load
    every file in a folder.
    """
    with suppress(ValueError, LookupError, TypeError, AttributeError):
        tensors = json.loads(header[8:])
        tensors.pop("__metadata__", None)
        for number, tensor in enumerate(tensors.values()):
            start, stop = tensor["data_offsets"]
            room = max(0, stop - start - _SAMPLE_BYTES)
            yield len(header) + start + (room * (number * _GOLDEN % (1 << 16)) >> 16)


def _config(path: Path) -> Any:
    def without_volatile(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: value for key, value in pairs if key not in _VOLATILE_KEYS}

    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=without_volatile)
    except FileNotFoundError:
        raise ModelNotSupported(f"no {path.name} in {path.parent}") from None
    except ValueError as error:
        raise ModelNotSupported(f"{path} is not JSON: {error}") from error
