"""How much an agent's turns write, by the kind of its model's layers.

    python -m benchmarks.tool_turns

One conversation of turns that follow each other at once, each with a tool's result and a short
reply. Tiny models have the layer kinds and the windows of the real ones, so what is written is
known in tokens of blocks and windows and in states; the bytes are those of the real shapes. Every
model is driven with each checkpoint written as it is made, and with those postponed that take no
longer to compute again than a kill may cost, at assumed speeds. The replies must be the same.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_lm_kvpersist.block import Block, Record
from mlx_lm_kvpersist.cache.geometry.spec import ModelCacheSpec, forms_bytes
from mlx_lm_kvpersist.cache.live.packed import GRID
from mlx_lm_kvpersist.request.checkpoint_saver import STATE
from mlx_lm_kvpersist.store.block_store import StoreLimits
from models_check.build import build
from models_check.conversation import random_ids
from models_check.stored import StoredModel
from tools.docs.disk import spec_of

from .report import Result

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.1 8B": ("llama", {}),
    "Qwen3-Next 80B-A3B": ("lfm2", {}),
    "Qwen3.5, Qwen3.6 35B-A3B": ("lfm2", {}),
    "Gemma 3 12B": ("gemma3_text", {"sliding_window": 1024}),
    "gpt-oss 20B": ("gpt_oss", {"sliding_window": 128}),
}
"""Real shapes, and tiny models with a layer of each of their kinds; some hold the quickest one."""

LONG = "Qwen3-Next 80B-A3B"
"""The model of the longest conversation. What a turn writes does not depend on those before it."""
N_LONG, N_TURNS = 200, 24
N_SYSTEM, N_TOOL, N_REPLY = 2000, 490, 10
"""Tokens of the system prompt, of a tool's result and of a reply."""
MAX_LOSS_S = 2.0


@dataclass
class Written:
    """What a conversation wrote. `bytes_of` counts it as files of a model of another size."""

    blocks: Counter[int] = field(default_factory=Counter)
    """Blocks by their number of tokens."""
    windows: Counter[int] = field(default_factory=Counter)
    """Tokens by their window."""
    n_states: int = 0
    n_newest: int = 0
    """Tokens that states hold as they were computed."""

    def add(self, record: Record, stops: Mapping[bytes, int]) -> None:
        """Count a record, by the ends of blocks."""
        if isinstance(record, Block):
            self.blocks[record.n_tokens] += 1
        elif record.kind == STATE:
            self.n_states += 1
            self.n_newest += stops[record.block] % GRID
        else:
            self.windows[int(record.kind.rpartition("-")[2])] += record.n_tokens

    def clear(self) -> None:
        """Begin anew."""
        self.blocks.clear()
        self.windows.clear()
        self.n_states = self.n_newest = 0

    def bytes_of(self, spec: ModelCacheSpec) -> int:
        blocks = sum(n * forms_bytes(spec.block_arrays(size)) for size, n in self.blocks.items())
        windows = sum(
            n_tokens * group.bytes_per_token
            for window, n_tokens in self.windows.items()
            for group in spec.sliding[window]
        )
        states = self.n_states * sum(group.state_bytes for group in spec.recurrent)
        return blocks + windows + states + self.n_newest * spec.newest_bytes


def hold(
    name: str, folder: Path, n_turns: int, max_loss_s: float, tokens_per_s: float
) -> tuple[Written, list[list[int]]]:
    """Hold a conversation; return what its turns wrote, without the first, and their replies."""
    tiny, config = MODELS[name]
    model = build(tiny, config=config)
    limits = StoreLimits(1 << 33, 1 << 40, max_loss_s=max_loss_s)
    stored = StoredModel(model, ModelCacheSpec.probe(model), folder, limits)
    # Chunks of two sizes tell tokens from overhead.
    for n_tokens in (512, 1024, 512, 1024):
        stored.loaded.speed.pace.learn(1, n_tokens, n_tokens / tokens_per_s)
    written, stops = Written(), dict[bytes, int]()
    disk: Any = stored.store.disk
    save = disk.save

    def counted(*args: Any) -> Any:
        if (saved := save(*args)) is not None:
            stops.update((block.key, block.stop) for block in saved[0].blocks)
            for record in saved[1]:
                written.add(record, stops)
        return saved

    disk.save = counted
    system, history = random_ids(1, N_SYSTEM), list[int]()
    replies: list[list[int]] = []
    for turn in range(n_turns + 1):
        history += random_ids(100 + turn, N_TOOL)
        reply = stored.answer([system, history], N_REPLY).ids
        history += reply
        replies.append(reply)
        if turn == 0:
            stored.store.drain()
            written.clear()
    # What is still postponed counts: a rest would write it.
    stored.close()
    return written, replies


def rows(name: str, n_turns: int, speeds: Sequence[int], folder: Path) -> list[dict[str, Any]]:
    """Return a model's rows, one for each assumed speed."""
    spec, made = spec_of(name), []
    before, replies = hold(name, folder / "before", n_turns, 0.0, 1.0)
    n_before = before.bytes_of(spec) / n_turns
    for tokens_per_s in speeds if not spec.any_prefix else speeds[:1]:
        after, same = hold(name, folder / f"{tokens_per_s}", n_turns, MAX_LOSS_S, tokens_per_s)
        if same != replies:
            raise AssertionError(f"{name}: replies differ")
        n_after = after.bytes_of(spec) / n_turns
        made.append(
            {
                "model": name,
                "turns": n_turns,
                "tokens/s": tokens_per_s,
                "MiB a turn, all written": round(n_before / (1 << 20), 1),
                "MiB a turn": round(n_after / (1 << 20), 1),
                "share": round(n_after / n_before, 3),
                "states a turn": round(after.n_states / n_turns, 2),
            }
        )
    return made


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--turns", type=int, help=f"turns in a row ({N_LONG} or {N_TURNS})")
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options.add_argument(
        "--speeds", nargs="+", type=int, default=[1000, 2000], help="prompt tokens a second"
    )
    options.add_argument("--out", type=Path, help="folder of the result")
    args = options.parse_args()
    result = Result(
        "tool-turns",
        "Bytes that each turn of a tool loop writes, by model and assumed speed of prompts.",
        {"tokens a turn": N_TOOL + N_REPLY, "max_loss_s": MAX_LOSS_S},
        folder=args.out,
    )
    for name in args.models:
        n_turns = args.turns or (N_LONG if name == LONG else N_TURNS)
        with tempfile.TemporaryDirectory() as folder:
            result.add(*rows(name, n_turns, args.speeds, Path(folder)))
    result.show()


if __name__ == "__main__":
    main()
