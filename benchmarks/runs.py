"""One run of benchmarks: the model, the prompts, and the file that its samples go to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from .models import BenchmarkModel
from .prompts import Prompts
from .report import Report
from .servers import BEFORE, OURS, SIDES, STOCK, Fleet, Side

BOTH = (OURS, STOCK)


@dataclass
class Run:
    """One run of benchmarks with one model. `before`: the side of another checkout, if any."""

    model: BenchmarkModel
    report: Report
    before: Side | None = None

    @cached_property
    def prompts(self) -> Prompts:
        return Prompts(self.model.tokenizer)

    def sides(self, names: Sequence[str] = BOTH) -> list[str]:
        """Return the names of sides, and `before` with them if the run has it."""
        return [*names, *([BEFORE] if self.before else [])]

    def side(self, name: str) -> Side:
        """Return the side of a name."""
        return self.before if name == BEFORE and self.before else SIDES[name]

    def fleet(self, names: Iterable[str]) -> Fleet:
        return Fleet(self.model.path, map(self.side, names))


def tokens(n: int) -> str:
    """Return a number of tokens as the tables name it.

    >>> tokens(8192), tokens(300)
    ('8K', '300')
    """
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)
