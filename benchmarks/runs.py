"""One run of benchmarks: the model, the prompts, and the file that its samples go to."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .models import DEFAULT_MODELS_DIR, BenchmarkModel, find_model
from .prompts import Prompts
from .report import DeviceResults, Report, compare
from .servers import BEFORE, OURS, SIDES, STOCK, Fleet, Side

BOTH = (OURS, STOCK)


@dataclass
class Run:
    """`before`: the side of another checkout, if any."""

    model: BenchmarkModel
    report: Report
    before: Side | None = None

    @cached_property
    def prompts(self) -> Prompts:
        return Prompts(self.model.tokenizer)

    def sides(self, names: Sequence[str] = BOTH) -> list[str]:
        return [*names, *([BEFORE] if self.before else [])]

    def side(self, name: str) -> Side:
        return self.before if name == BEFORE and self.before else SIDES[name]

    def fleet(self, names: Iterable[str], n_ranks: int = 1) -> Fleet:
        return Fleet(self.model.path, [self.side(name) for name in names], n_ranks)


def tokens(n: int) -> str:
    """Return a number of tokens as the tables write it.

    >>> tokens(8192), tokens(300)
    ('8K', '300')
    """
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)


def parser(doc: str | None, model: str, n_tokens: int) -> argparse.ArgumentParser:
    """`doc` is the docstring of the benchmark's module."""
    options = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out = Path(tempfile.gettempdir()) / "kvpersist-benchmarks"
    options.add_argument("--model", default=model, help=f"(default: {model})")
    options.add_argument("--models-dir", type=Path, default=DEFAULT_MODELS_DIR, metavar="FOLDER")
    options.add_argument("--tokens", type=int, default=n_tokens, help=f"(default: {n_tokens})")
    options.add_argument("--repeats", type=int, default=3, help="(default: 3)")
    options.add_argument(
        "--out", type=Path, default=out, metavar="FOLDER", help=f"(default: {out})"
    )
    return options


def run_of(args: argparse.Namespace, part: str) -> Run:
    """The run's samples are written to PART.json."""
    model = find_model(args.model, args.models_dir)
    return Run(model, Report(part, model.about(), {}, args.out))


def show(run: Run, base: str) -> None:
    print(compare(DeviceResults("", [run.report.content]), base))
    print(*run.report.content["notes"].values(), f"saved in {run.report.path}", sep="\n")
