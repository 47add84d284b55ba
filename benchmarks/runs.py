"""One run of benchmarks: the model, the prompts, and the file that its samples go to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .models import BenchmarkModel
from .prompts import Prompts
from .report import Report
from .servers import OURS, REPOSITORY, STOCK, Fleet

BOTH = (OURS, STOCK)


@dataclass
class Run:
    """One run of benchmarks with one model. `checkout`: whose code the servers run."""

    model: BenchmarkModel
    report: Report
    checkout: Path = REPOSITORY

    @cached_property
    def prompts(self) -> Prompts:
        return Prompts(self.model.tokenizer)

    def fleet(self, sides: Sequence[str] = BOTH) -> Fleet:
        return Fleet(self.model.path, sides, self.checkout)


def tokens(n: int) -> str:
    """Return a number of tokens as the tables name it.

    >>> tokens(8192), tokens(300)
    ('8K', '300')
    """
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)
