"""The goals the project has set itself, and what the kept results say of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .stall import AFTER, WRITING
from .ttft import COLD, FROM_DISK

Results = Sequence[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Reached:
    """A goal on one device: `value` against a bound; None where nothing was measured."""

    what: str
    bound: str
    value: float | None
    is_met: bool
    source: str


@dataclass(frozen=True)
class _Goal:
    """`values` finds the ratios in a result's rows, each with the place it came from."""

    what: str
    result: str
    values: Callable[[dict[str, Any]], Iterator[tuple[str, float]]]
    limit: float
    at_most: bool = True
    gpu_limit: float | None = None

    def judged(self, device: str, result: dict[str, Any]) -> Iterator[Reached]:
        is_gpu = result["device"].get("kind") == "gpu"
        limit = self.gpu_limit if is_gpu and self.gpu_limit is not None else self.limit
        found = list(self.values(result))
        if not found:
            return
        # A goal that holds at several places holds where it is hardest.
        where, value = (max if self.at_most else min)(found, key=lambda pair: pair[1])
        is_met = value <= limit if self.at_most else value >= limit
        sign = "<=" if self.at_most else ">="
        source = f"{device}, {result['name']}{where}"
        yield Reached(self.what, f"{sign} {limit:g}", value, is_met, source)


def reached(results: Results) -> list[Reached]:
    """Return every goal with what each device's results say of it."""
    said: list[Reached] = []
    for goal in _GOALS:
        judged = [
            verdict
            for device, result in results
            if result["name"].startswith(f"{goal.result}-")
            for verdict in goal.judged(device, result)
        ]
        sign = "<=" if goal.at_most else ">="
        missing = Reached(goal.what, f"{sign} {goal.limit:g}", None, False, "")
        said += judged or [missing]
    return said


def _column(column: str, **wanted: Any) -> Callable[[dict[str, Any]], Iterator[tuple[str, float]]]:
    """Return what finds a column's numbers in the rows that have the wanted values."""

    def values(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
        for row in result["rows"]:
            if all(row.get(key) == value for key, value in wanted.items()):
                if isinstance(row.get(column), int | float):
                    yield _place(row), float(row[column])

    return values


def _place(row: dict[str, Any]) -> str:
    parts = [f"{row[name]:,} tokens" for name in ("context",) if name in row]
    parts += [f"batch {row['batch']}" for name in ("batch",) if name in row]
    return "".join(f", {part}" for part in parts)


def _live_kv(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for row in result["rows"]:
        ours, stock = row.get("ours KV MB by shape"), row.get("stock KV MB by shape")
        if ours and stock:
            yield _place(row), ours / stock


def _restore_over_copy(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for row in result["rows"]:
        if row.get("what") == "restore, warm" and row.get("ratio"):
            yield "", 1 / row["ratio"]


def _slowdown_by_writing(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Find the slowdown while files were written, or in the second in which they were."""
    for situation in (WRITING, AFTER):
        found = list(_column("slowdown", side="ours", **{"while": situation})(result))
        if found:
            yield from ((f"{place}, {situation}", value) for place, value in found)
            return


_GOALS = (
    _Goal("cold prefill, ours over stock", "ttft", _column("ours / stock", state=COLD), 1.05),
    _Goal(
        "decode of 8 at 4K, ours over stock, tokens/s",
        "decode",
        _column("ours / stock", context=4096, batch=8),
        0.95,
        at_most=False,
    ),
    _Goal(
        "decode of 8 at 4K, ours over stock --kv-bits 4, tokens/s",
        "decode",
        _column("ours / stock-4", context=4096, batch=8),
        4,
        at_most=False,
    ),
    _Goal("live KV bytes by shape, ours over stock", "decode", _live_kv, 0.30),
    _Goal(
        "first token after a restart over cold, 8K",
        "ttft",
        _column("ours / its cold", context=8192, state=FROM_DISK),
        0.01,
        gpu_limit=0.15,
    ),
    _Goal(
        "restore over the disk's raw read rate, page cache cold",
        "store",
        _column("ratio", what="restore, cold"),
        0.8,
        at_most=False,
    ),
    _Goal(
        "time of a restore over a memory copy's, page cache warm", "store", _restore_over_copy, 1.5
    ),
    _Goal(
        "decode slowdown while the writer runs",
        "stall",
        _slowdown_by_writing,
        0.03,
    ),
)
