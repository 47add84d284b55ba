"""Find the model of `--model`: a synthetic shape, a folder, or a name on the hub."""

from __future__ import annotations

import fcntl
import json
import shutil
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import platformdirs
from huggingface_hub import snapshot_download
from mlx_lm.tokenizer_utils import load as load_tokenizer

from mlx_lm_kvpersist.cache.geometry.fingerprint import model_fingerprint
from tests.support.synthetic import smollm2

from .shapes import MODEL_SHAPES, TINY, make_shaped_model

SYNTHETIC = "synthetic:"
SMOLLM2 = "smollm2-float32"
DEFAULT_MODELS_DIR = Path(platformdirs.user_cache_dir("mlx-lm-kvpersist-benchmarks")) / "models"


@dataclass(frozen=True)
class BenchmarkModel:
    name: str
    path: Path

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.path)

    @cached_property
    def fingerprint(self) -> str:
        return model_fingerprint(self.path, None)

    @cached_property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
        return config

    @property
    def slug(self) -> str:
        kept = (char if char.isalnum() or char in ".-" else "-" for char in self.name.lower())
        return "".join(kept).strip("-.")

    def about(self) -> dict[str, Any]:
        """Return the facts that are saved with results."""
        n_bytes = sum(path.stat().st_size for path in self.path.glob("*.safetensors"))
        return {
            "name": self.name,
            "fingerprint": self.fingerprint[:16],
            "model_type": self.config["model_type"],
            "weights_bytes": n_bytes,
            "random_weights": self.name.startswith(SYNTHETIC),
        }


def find_model(name: str, models_dir: Path = DEFAULT_MODELS_DIR) -> BenchmarkModel:
    """Return the model of this name; make a missing synthetic model or SmolLM2.

    Raises SystemExit with one line for an unknown model.
    """
    if name.startswith(SYNTHETIC):
        shape = name.removeprefix(SYNTHETIC)
        if shape not in (TINY, *MODEL_SHAPES):
            known = ", ".join(SYNTHETIC + known for known in (TINY, *MODEL_SHAPES))
            raise SystemExit(f"there is no model {name}; choose from {known}")
        return BenchmarkModel(name, _made(models_dir / shape, shape))
    if name == SMOLLM2:
        return BenchmarkModel(name, _smollm2(models_dir / name))
    path = Path(name).expanduser()
    if path.is_dir():
        return BenchmarkModel(path.name, path)
    if name.startswith(("/", ".", "~")):
        raise SystemExit(f"there is no model folder {name}")
    try:
        return BenchmarkModel(name, Path(snapshot_download(name, local_files_only=True)))
    except Exception as error:
        raise SystemExit(
            f"{name} is not a folder and not in the hub's cache ({error}); "
            f"download the model first: hf download {name}"
        ) from error


def _made(path: Path, shape: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several parts of a run may start at once: the first makes the model, the rest wait.
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (path / "config.json").exists():
            # An interrupted run leaves nothing that looks like a model.
            unfinished = path.with_name(f".{path.name}.part")
            shutil.rmtree(unfinished, ignore_errors=True)
            make_shaped_model(unfinished, shape, progress=_print_progress)
            unfinished.rename(path)
    return path


def _smollm2(path: Path) -> Path:
    if not (path / "config.json").exists():
        if smollm2.main([str(path)]):
            raise SystemExit(f"there is no model {SMOLLM2}: {smollm2.NOT_FETCHED}")
    return path


def _print_progress(done: int, total: int) -> None:
    print(f"model: {done / 1e9:.1f} of {total / 1e9:.1f} GB", file=sys.stderr, flush=True)
