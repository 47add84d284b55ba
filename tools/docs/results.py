"""Tables of results for people who choose, from the JSON files of `benchmarks/results`.

To show newer runs, name them below, clear `SINCE`, and run `make docs`. Nothing else in README.md
or docs/ repeats these figures.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from textwrap import fill
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FIRST_TOKEN = (
    "nvidia-h200/ttft-synthetic-llama-3.1-8b-k6v4",
    "nvidia-h200/ttft-synthetic-llama-3.1-8b-hot",
)
"""A row of a later one takes the place of the same row before."""
TOGETHER = "nvidia-h200/together-synthetic-llama-3.1-8b"
NEXT_TURNS = "nvidia-h200/together-turns-synthetic-llama-3.1-8b"
DECODE = "nvidia-h200/decode-synthetic-llama-3.1-8b-k6v4"
SHARED = "amd-epyc-cpu/shared-smollm2-float32"
SHARED_COMMIT = "c0dfcef"
"""The commit that brought this result in: the one that the result names is not in the history."""
OURS = "ours"
"""The side of all of them that is shown, see `benchmarks/servers.py`."""
SINCE = (
    "Since then the newest block is kept as computed, and a new prompt takes 6 to 9% longer on "
    "this GPU. The default is now `k8v4`, which takes 18% more bytes than `k6v4`."
)
"""What changed after these runs; "" if they are of today's default."""
_LONG = 32_768
_STATES = {
    "cold": "a new prompt",
    "hot": "the same prompt again",
    "extend": "the next turn",
    "restart, disk": "the same prompt after a restart",
}


def load(name: str) -> Any:
    """Return a result by its folder and name."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def in_short() -> str:
    """Return what users feel: three times to the first token, and how they were measured."""
    times = {
        (row["context"], row["state"]): (row["stock s"], row[f"{OURS} s"])
        for row, _ in _first_tokens()
    }
    beside = _together()["a short prompt beside a long one"]
    rows = [
        f"| {what} | {stock:.1f} | **{ours:.1f}** | {how} |"
        for what, (stock, ours), how in (
            (
                "an agent's conversation, after a restart",
                times[_LONG, "restart, disk"],
                f"the same prompt of {_LONG:,} tokens, page cache cold",
            ),
            (
                "a new long prompt",
                times[_LONG, "cold"],
                f"{_LONG:,} tokens; on a CPU hardly sooner than stock",
            ),
            (
                "a short question during a long prompt",
                (beside["stock"], beside[OURS]),
                f"the long one has {_LONG:,} tokens",
            ),
        )
    ]
    columns = ("seconds to the first token", "stock", "with the plugin", "measured with")
    return f"{_table(*columns, rows=rows)}\n\n{_measured(*FIRST_TOKEN, TOGETHER)}"


def first_token() -> str:
    """Return seconds to the first token, with the plugin and without."""
    rows = [
        f"| {_STATES[row['state']]} | {row['context']:,} | {row['stock s']:.2f} "
        f"| {row[f'{OURS} s']:.2f} | {_commit(run)} |"
        for row, run in _first_tokens()
    ]
    columns = ("first token after, s", "tokens", "stock", "with the plugin", "commit")
    return _table(*columns, rows=rows)


def _first_tokens() -> Iterable[tuple[dict[str, Any], Any]]:
    """Return the rows to be shown, each with its run."""
    found: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}
    for run in map(load, FIRST_TOKEN):
        for row in run["rows"]:
            if row["state"] in _STATES:
                found[row["context"], row["state"]] = row, run
    return found.values()


def decode() -> str:
    """Return tokens a second and KV bytes of conversations at the same time."""
    run = load(DECODE)
    rows = [
        f"| {row['batch']} | {row['context']:,} | {row['stock tokens/s']:.0f} "
        f"| {row[f'{OURS} tokens/s']:.0f} | {_mib(row['stock KV MB by shape'])} "
        f"| {_mib(row[f'{OURS} KV MB by shape'])} | {_commit(run)} |"
        for row in run["rows"]
    ]
    columns = ("stock, tokens a second", "with the plugin", "stock, MiB of KV", "with the plugin")
    return _table("conversations", "tokens each", *columns, "commit", rows=rows)


def _mib(megabytes: float) -> str:
    return f"{megabytes * 1e6 / (1 << 20):,.0f}"


def together() -> str:
    """Return seconds to the first token of prompts that arrive together, and to replies' end."""
    commit = _commit(load(TOGETHER))
    rows = [
        f"| {what} | {side['stock']:.2f} | {side[OURS]:.2f} | {commit} |"
        for what, side in _together().items()
    ]
    turns = {row["side"]: row for row in load(NEXT_TURNS)["rows"]}
    names = "the first of eight next turns, 16 bits", "all of these turns, to their ends"
    for what, column in zip(names, ("first token s", "total s"), strict=True):
        stock, ours = (turns[side][column] for side in ("stock", "ours-16"))
        rows.append(f"| {what} | {stock:.2f} | {ours:.2f} | {_commit(load(NEXT_TURNS))} |")
    return _table("until the first token of, s", "stock", "with the plugin", "commit", rows=rows)


def _together() -> dict[str, dict[str, float]]:
    """Return seconds by what is measured, and by side."""
    found: dict[str, dict[str, float]] = {}
    for row in load(TOGETHER)["rows"]:
        found.setdefault(row["what"], {})[row["side"]] = row["together s"]
    return found


def shared() -> str:
    """Return seconds to the first token of prompts that another server has put."""
    run = load(SHARED)
    rows = []
    for row in run["rows"]:
        place = row["store"] + (
            f", {row['MB/s'] * 1e6 / (1 << 20):.2g} MiB/s" if row["MB/s"] else ""
        )
        cells = [f"{row[what]:.2f}" for what in ("computed s", "shared s", "at most")]
        cpu, reused = row["shared CPU s"] / row["computed CPU s"], row["reused"]
        rows.append(f"| {' | '.join([place, *cells, f'{cpu:.2f}', f'{reused:,}'])} |")
    columns = ("store", "computed, s", "with the store, s", "at most, of computing", "CPU time")
    n_tokens = run["setting"]["prompt tokens"]
    said = (
        f"{run['model']['name']}, prompts of {n_tokens:,} tokens, {run['device']['device_name']}, "
        f"measured on {run['date'][:10]} with older code (before `{SHARED_COMMIT}`): medians of "
        "the first token, and the largest ratio of a pair."
    )
    said = fill(said, 100, break_long_words=False, break_on_hyphens=False)
    return f"{_table(*columns, 'tokens reused', rows=rows)}\n\n{said}"


def conditions() -> str:
    """Return on what, when and with which code and options everything here was measured."""
    return _measured(*FIRST_TOKEN, TOGETHER, DECODE)


def _measured(*names: str) -> str:
    runs = [load(name) for name in names]
    precisions, devices, versions, days = (
        " and ".join(sorted(set(each)))
        for each in (
            (_precision(run["setting"]["sides"][OURS]) for run in runs),
            (run["device"]["device_name"] for run in runs),
            (run["versions"]["mlx-lm"] for run in runs),
            (run["date"][:10] for run in runs),
        )
    )
    commits = ", ".join(dict.fromkeys(map(_commit, runs)))
    said = (
        f"{devices}, mlx-lm {versions}, a model of Llama 3.1 8B's shape with random 4-bit weights, "
        f"{precisions}; measured on {days} at {commits}. {SINCE}"
    )
    return fill(said, 100, break_long_words=False, break_on_hyphens=False)


def _precision(options: str) -> str:
    _, asked, bits = options.partition("--kvpersist-kv-bits ")
    return f"`{asked}{bits.split()[0]}`" if asked else "the default precision"


def _commit(run: Any) -> str:
    return f"`{run['commit']}`"


def _table(*columns: str, rows: list[str]) -> str:
    dashes = " | ".join(["---"] * len(columns))
    return "\n".join([f"| {' | '.join(columns)} |", f"| {dashes} |", *rows])
