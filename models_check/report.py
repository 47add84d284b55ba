"""Findings as a table, on the terminal and as a page of the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version

from .compare import TOLERANCE
from .configs import NOT_IN_THE_ZOO, module_of
from .conversation import N_TURNS
from .stock import NOT_JOINTLY
from .sweep import Finding

_INTRO = f"""# Models

What the plugin does with each architecture of mlx-lm, tried on tiny models with random float32
weights. This page is made by

```sh
python -m models_check --write docs/models.md
```

on a CPU, here with mlx-lm {{mlx_lm}} and mlx {{mlx}}. Each model is served by the facts about its
architecture that ship with the package, and its attention takes packed keys where they allow it.
With `--unknown` no facts are used, as for a model with its own code; the results are the same.

Each model holds a conversation of {N_TURNS} turns, longer than a block and than any of its windows,
in the stock server's batch generator; or alone, as the server does where caches cannot be merged.
The reference is one set of our caches that lives as long as the conversation. Compared are

- **live**: the reference itself with the model's own caches, made to round as ours do;
- **restored**: the conversation with a store that is closed and opened anew in the middle and
  before the last turn;
- **rewound**: back by one turn after a restart, and on differently;
- **cut anywhere**: prompts that leave the stored conversation in the middle of turns, with
  computing them from scratch;
- **in a batch**, **joining a batch**: two other last turns, restored, and a new prompt of another
  length, which come together, or one after another;
- **short**: a conversation that begins shorter than any window, with a restart before each turn.

*equal*: in every step of all of them the same token is the likeliest, and log-probabilities differ
by at most {TOLERANCE:g} of their range. Every run is given the reference's replies, so a near tie
(two tokens nearer to each other than that) changes nothing behind it and is no difference.
*refused*: the plugin leaves the model to stock and says so when it is loaded. *stock fails*: one
prompt in stock's generator, with the model's own caches, raises.

Some architectures are wrong in stock itself when prompts of different lengths are in one batch.
*stock batches right*, measured with the model's own caches, says "{NOT_JOINTLY}" where only prompts
that are computed together come out wrong; *together* is what we let run in one batch. Some are
wrong when a prompt is computed in pieces: *pieces* is how far logits are apart, with the model's
own caches, when a prompt is computed in two pieces and in one. Differences that stock has as well,
in every batch or because of pieces, are listed under *As in stock* and not counted.

*reused* is how many tokens of earlier turns the conversation's turns took from the store, and
*reusable* where it can be left: how many tokens are reused of how many that agree; *by blocks*: all
of them, or all up to the block of 256 in which it is left.
"""

_TURNS = """
## What a turn writes

A turn of 500 tokens: its blocks, its newest tokens as they were computed, and of models with
windows or recurrent layers their checkpoints ([store.md](store.md#what-happens-when)). *In a row*:
turns of a tool follow each other, prompts are computed at 1,000 tokens a second, and a checkpoint
is written every two seconds of computing; quicker machines write less. *After a rest*: nobody went
on for 30 seconds, so the checkpoint of the reply's end is written. The last column is what each
turn writes if no checkpoint is postponed. The shapes are those of the makers' config.json, in
bfloat16. Tiny models with such layers write [as much](benchmarks.md#settled-questions).

<!-- made: turns -->
<!-- end of turns -->
"""

_COLUMNS = (
    "model",
    "caches",
    "live and stored",
    "reused",
    "reusable",
    "result",
    "largest difference",
    "pieces",
    "together",
    "stock batches right",
)


def line(finding: Finding) -> str:
    """Return one line for the terminal."""
    worst = max(finding.differences.values(), default=0.0)
    numbers = f"{worst:8.1e}" if finding.differences else " " * 8
    what = finding.reason or f"{finding.precisions}; reusable {finding.reusable}"
    return (
        f"{finding.name:32} {finding.result:8} {numbers} {finding.seconds:5.1f} s  "
        f"{finding.caches:34} stock batches: {finding.stock_batches_right:12} {what}"
    )


def summary(findings: Sequence[Finding]) -> str:
    """Return how many names came out how."""
    counts = Counter(finding.result for finding in findings)
    modules = len({module_of(finding.name) for finding in findings})
    results = ", ".join(f"{n} {result}" for result, n in sorted(counts.items()))
    return f"{len(findings)} models of {modules} modules: {results}"


def page(findings: Sequence[Finding]) -> str:
    """Return docs/models.md."""
    rows = [_table_row(_COLUMNS), _table_row(["---"] * len(_COLUMNS))]
    rows += [_table_row(_cells(finding)) for finding in findings]
    reasons = [f"- `{finding.name}`: {finding.reason}." for finding in findings if finding.reason]
    excused = [
        f"- `{finding.name}`: {_excuse(finding)}." for finding in findings if finding.excused
    ]
    not_in_the_zoo = [f"- `{name}`: {why}." for name, why in sorted(NOT_IN_THE_ZOO.items())]
    lines = [
        _INTRO.format(mlx_lm=version("mlx-lm"), mlx=version("mlx")),
        f"{summary(findings)}.\n",
        *rows,
        _TURNS,
        "## Refused, or wrong\n",
        *(reasons or ["None."]),
        "\n## As in stock\n",
        *(excused or ["None."]),
        "\n## Not in the table\n",
        "Modules of `mlx_lm.models` that hold no model, or none that can run:\n",
        *not_in_the_zoo,
    ]
    return "\n".join(lines) + "\n"


def _cells(finding: Finding) -> list[str]:
    return [
        f"`{finding.name}`",
        finding.caches,
        finding.precisions,
        _reused(finding),
        finding.reusable,
        finding.result,
        _number(max(finding.differences.values(), default=None)),
        _number(finding.pieces),
        finding.batching,
        finding.stock_batches_right,
    ]


def _reused(finding: Finding) -> str:
    if not finding.possible:
        return ""
    if finding.reused == finding.possible:
        return "all"
    return f"{sum(finding.reused)} of {sum(finding.possible)}"


def _excuse(finding: Finding) -> str:
    return ", ".join(
        f"{what} {_number(value)}" if value < float("inf") else f"{what} raises"
        for what, value in finding.excused.items()
    )


def _table_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.0e}"
