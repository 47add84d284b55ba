"""Tables of results for people who choose, from the JSON files of `benchmarks/results`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FIRST_TOKEN = "nvidia-h200/ttft-synthetic-llama-3.1-8b-k6v4"
DECODE = "nvidia-h200/decode-synthetic-llama-3.1-8b-k6v4"
TOGETHER = "nvidia-h200/together-synthetic-llama-3.1-8b"
_STATES = {
    "cold": "a new prompt",
    "hot": "the same prompt again",
    "extend": "the next turn",
    "restart, disk": "the same prompt after a restart",
}


def load(name: str) -> Any:
    """Return a result by its folder and name."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def first_token() -> str:
    """Return seconds to the first token, with the plugin and without."""
    rows = [
        f"| {_STATES[row['state']]} | {row['context']:,} | {row['stock s']:.2f} "
        f"| {row['ours s']:.2f} |"
        for row in load(FIRST_TOKEN)["rows"]
        if row["state"] in _STATES
    ]
    return _table("first token after, s", "tokens", "stock", "with the plugin", rows=rows)


def decode() -> str:
    """Return tokens a second and KV bytes of conversations at the same time."""
    rows = [
        f"| {row['batch']} | {row['context']:,} | {row['stock tokens/s']:.0f} "
        f"| {row['ours tokens/s']:.0f} | {_mib(row['stock KV MB by shape'])} "
        f"| {_mib(row['ours KV MB by shape'])} |"
        for row in load(DECODE)["rows"]
    ]
    columns = ("stock, tokens a second", "with the plugin", "stock, MiB of KV", "with the plugin")
    return _table("conversations", "tokens each", *columns, rows=rows)


def _mib(megabytes: float) -> str:
    return f"{megabytes * 1e6 / (1 << 20):,.0f}"


def together() -> str:
    """Return seconds to the first token of prompts that arrive together."""
    sides: dict[str, dict[str, Any]] = {}
    for row in load(TOGETHER)["rows"]:
        sides.setdefault(row["what"], {})[row["side"]] = row
    rows = [
        f"| {what} | {side['stock']['together s']:.2f} | {side['ours']['together s']:.2f} |"
        for what, side in sides.items()
    ]
    return _table("first token after, s", "stock", "with the plugin", rows=rows)


def _table(*columns: str, rows: list[str]) -> str:
    dashes = " | ".join(["---"] * len(columns))
    return "\n".join([f"| {' | '.join(columns)} |", f"| {dashes} |", *rows])
