"""The project's performance goals, and a verdict on each from saved results.

A goal limits the ratio of two rows of one run, mostly the plugin's row to the stock server's. The
precision is the default unless the goal names another side.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import decode, stall, start, store, streams, together, ttft
from .report import DeviceResults, ratio
from .servers import OURS, OURS_16, STOCK

REACHED, MISSED, NOT_MEASURED = "reached", "missed", "not measured"


@dataclass(frozen=True)
class Goal:
    """The bounds of a ratio on a CPU (SmolLM2, OpenBLAS) and on a GPU (8B shape); None: no goal.

    The row `what` of `side` is divided by the row `base` (default: `what`) of `base_side`.
    """

    question: str
    what: str
    cpu: float | None
    gpu: float | None
    side: str = OURS
    base: str | None = None
    base_side: str = STOCK
    at_least: bool = False

    def bound(self, kind: str) -> float | None:
        return self.gpu if kind == "gpu" else self.cpu

    def shown_bound(self, kind: str) -> str:
        bound = self.bound(kind)
        sign = "at least" if self.at_least else "at most"
        return "" if bound is None else f"{sign} {bound:g}"

    def ratio(self, results: DeviceResults) -> float | None:
        """Return None without samples."""
        return ratio(
            results.values(self.question, self.what, self.side),
            results.values(self.question, self.base or self.what, self.base_side),
        )

    def verdict(self, results: DeviceResults) -> str:
        """Return "" if these results have no such goal."""
        bound, found = self.bound(results.kind), self.ratio(results)
        if bound is None or not results.is_preset:
            return ""
        if found is None:
            return NOT_MEASURED
        is_reached = found >= bound if self.at_least else found <= bound
        return REACHED if is_reached else MISSED


def _first_token(
    what: str, cpu_8k: float, gpu_8k: float, gpu_32k: float, base: str | None = None
) -> list[Goal]:
    bounds = (("8K", cpu_8k, gpu_8k), ("32K", None, gpu_32k))
    return [
        Goal(ttft.QUESTION, f"{what}, {n}", cpu, gpu, base=base and f"{base}, {n}")
        for n, cpu, gpu in bounds
    ]


def _decode(what: str, cpu: float | None) -> Goal:
    return Goal(decode.QUESTION, what, cpu, 0.95, at_least=True)


GOALS = (
    Goal(start.QUESTION, start.FIRST, 1.1, 1.1),
    Goal(start.QUESTION, start.LATER, 1.1, 1.1),
    Goal(start.QUESTION, start.SECOND_TURN, 1.1, 1.2),
    *_first_token("new prompt", 1.05, 1.1, 0.9),
    *_first_token("same prompt again", 0.8, 1.2, 1.2),
    *_first_token("next turn", 0.9, 0.8, 0.9),
    *_first_token("after a restart", 0.08, 0.25, 0.1, base="new prompt"),
    *(_decode(f"{n} of 4K", 0.75) for n in (1, 2, 8)),
    _decode("2 of 16K", None),
    Goal(together.QUESTION, together.ALL_TURNS, 1.05, 1.05, side=OURS_16),
    Goal(together.QUESTION, together.ALL_TURNS, 1.35, 1.15),
    Goal(together.QUESTION, together.LAST, 1.25, 1.25, base=together.ALONE, base_side=OURS),
    # On two cores 16K tokens take five minutes. 4K are enough: stock pauses for one chunk of 2K.
    Goal(stall.QUESTION, "during 4K", 0.5, None),
    Goal(stall.QUESTION, "during 16K", None, 0.5),
    *(
        Goal(streams.QUESTION, f"{clients}, {time} time", 1.1, 1.1)
        for clients in ("1 client", "4 clients", "8 clients")
        for time in ("wall", "CPU")
    ),
    Goal(decode.MEMORY, "8 of 4K", 0.42, 0.42),
)
QUESTIONS = (*dict.fromkeys(goal.question for goal in GOALS), store.QUESTION)
"""All questions of RESULTS.md. `store` has no goal."""
