"""Shared by all benchmarks of a server: model, sides, place of results, time left."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.support import Reply

from .models import DEFAULT_MODELS_DIR, SYNTHETIC, BenchmarkModel, find_model
from .prompts import Prompts
from .report import FOLDER, Result, device_slug
from .servers import BEFORE, DEFAULT_SIDES, REPOSITORY, SIDES, Fleet


class Deadline:
    """When a run must have ended, if ever. Nothing is begun that would not be done by then."""

    def __init__(self, seconds: float | None = None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return float("inf") if self._end is None else self._end - time.monotonic()

    def allows(self, seconds: float) -> bool:
        """Say whether there is time for something that takes about so long."""
        return self.left_s > seconds


class Costs:
    """How long a prompt takes to compute, by the slowest seen so far; 0 before the first."""

    def __init__(self) -> None:
        self._s_per_token = 0.0

    def learn(self, reply: Reply) -> None:
        """Learn from a reply, if most of its prompt was computed."""
        n_computed = reply.prompt_tokens - reply.cached_tokens
        if n_computed > reply.prompt_tokens / 2:
            self._s_per_token = max(self._s_per_token, reply.total_s / n_computed)

    def of(self, n_tokens: int) -> float:
        """Return about how many seconds a prompt of so many tokens takes."""
        return self._s_per_token * n_tokens


@dataclass
class Run:
    """One run of benchmarks: their results name the same model and go to the same folder."""

    model: BenchmarkModel
    out: Path
    sides: tuple[str, ...] = DEFAULT_SIDES
    deadline: Deadline = field(default_factory=Deadline)
    costs: Costs = field(default_factory=Costs)
    before: Path = REPOSITORY
    _results: dict[str, Result] = field(default_factory=dict)

    @cached_property
    def prompts(self) -> Prompts:
        return Prompts(self.model.tokenizer)

    def fleet(self, sides: Sequence[str] | None = None, extra: Sequence[str] = ()) -> Fleet:
        return Fleet(self.model.path, sides or self.sides, extra, self.before)

    def result(self, name: str, about: str, setting: dict[str, Any]) -> Result:
        """Return the result of this name: a benchmark may add to it in several steps."""
        if name not in self._results:
            self._results[name] = Result(
                f"{name}-{self.model.slug}",
                about,
                setting,
                model=self.model.about(),
                folder=self.out,
            )
        return self._results[name]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark that runs a model."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--model",
        default=f"{SYNTHETIC}tiny",
        help=f"{SYNTHETIC}SHAPE with random weights, a folder, or a hub name (%(default)s)",
    )
    made.add_argument(
        "--models-dir",
        type=Path,
        default=DEFAULT_MODELS_DIR,
        help="where synthetic models are made and kept (%(default)s)",
    )
    made.add_argument(
        "--out", type=Path, help="folder of the results (default: benchmarks/results/DEVICE)"
    )
    made.add_argument(
        "--sides", nargs="+", choices=SIDES, default=list(DEFAULT_SIDES), help="what to compare"
    )
    made.add_argument(
        "--before",
        type=Path,
        metavar="CHECKOUT",
        help="compare with the code of this folder, too: side `before`",
    )
    made.add_argument(
        "--deadline", type=float, metavar="SECONDS", help="end cleanly before that, with what is"
    )
    return made


def run_of(args: argparse.Namespace) -> Run:
    """Return the run that parsed options describe."""
    deadline = Deadline(args.deadline)
    return Run(
        find_model(args.model, args.models_dir),
        args.out or FOLDER / device_slug(),
        (*args.sides, *((BEFORE,) if args.before else ())),
        deadline,
        before=args.before.resolve() if args.before else REPOSITORY,
    )


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def ratio(over: Sequence[float], under: Sequence[float]) -> float | None:
    """Return the median of the ratios of what was measured in the same turn."""
    pairs = [a / b for a, b in zip(over, under, strict=False) if b]
    return median(pairs)


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the value that `share` of the values do not exceed."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
