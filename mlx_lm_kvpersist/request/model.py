"""What is known of the model that the server has loaded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..cache.spec import Batching, ModelCacheSpec
from ..errors import ModelNotSupported
from ..match.block import Root
from ..match.text import TokenText
from ..units import show_bytes

_BATCHING = {
    Batching.ALL: "prompts and replies in batches",
    Batching.DECODE: "replies in batches, prompts one at a time",
    Batching.NONE: "one request at a time",
}


@dataclass(frozen=True)
class LoadedModel:
    """A model whose conversations are kept.

    `model` may be a weak proxy: the server drops a model before it loads the next, and two do not
    always fit into memory.
    """

    model: Any
    tokenizer: Any
    spec: ModelCacheSpec
    fingerprint: str
    text: TokenText | None
    """None when prompts are matched by ids: text is not to be stored, or not understood."""
    name: str = ""
    """What people call the model."""

    @cached_property
    def root(self) -> Root:
        """The root of this model's tree, without a namespace or a session."""
        return Root(
            self.fingerprint, self.spec.layout, with_text=self.text is not None, model=self.name
        )

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


def described(spec: ModelCacheSpec) -> str:
    """Return how full layers are stored, batched and attended, for the log."""
    found = []
    for precision in dict.fromkeys(group.precision for group in spec.full):
        if precision is None:
            found.append("in full precision")
        elif precision.bits == precision.of_values.bits:
            found.append(f"in {precision.bits} bits")
        else:
            found.append(
                f"in {precision.bits} bits for keys, {precision.of_values.bits} for values"
            )
    kept = " or ".join(found) or "in windows and states alone"
    plans = {
        f"prefill {p.prefill}, decode {p.decode}, batches {p.batch_decode}"
        for p in spec.plans.values()
    }
    attention = f"attention: {' or '.join(sorted(plans))}" if plans else "attention as in mlx-lm"
    n_bytes = show_bytes(spec.bytes_per_token)
    return f"{n_bytes} a token {kept}, {_BATCHING[spec.batching]}, {attention}"


def local_path(model: str) -> Path:
    """Return the folder of a model that has been loaded: a path, or a repository in the cache."""
    path = Path(model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except Exception as error:
        raise ModelNotSupported(f"the files of model {model} cannot be found: {error}") from error
