"""Findings as a table, on the terminal and as a page of the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version

from .compare import TOLERANCE
from .configs import module_of
from .conversation import N_TURNS
from .sweep import Finding

_INTRO = f"""# Models

This page shows how the plugin stores each mlx-lm architecture's caches. The results come from tiny
models with random float32 weights on a CPU, with mlx-lm {{mlx_lm}} and mlx {{mlx}}.
`mlx-lm-kvpersist spec --model M` shows how your model's cache is stored.

- *Layers*: the kinds of caches that the model's layers have.
- *Resumes at*: if a prompt diverges from a stored conversation, computing resumes at the last
  multiple of 256 tokens, or at an earlier checkpoint. A continued conversation reuses all stored
  tokens.
- *In one batch*: whether the server computes prompts or replies of several conversations together.

{{summary}} ([what this means](#how-this-was-tested)).

{{table}}

## How this was tested

With each model, the stock server's batch generator computes a conversation of {N_TURNS} turns. The
conversation is longer than a block and the model's windows. The precision is the plugin's default
(8-bit keys and 4-bit values, rotated). The results of the plugin's caches without a store are
compared with the results of:

- the model's own caches, rounded like the plugin's caches (*live*);
- the conversation with a store that is reopened before two turns;
- a different last turn after the store is reopened;
- prompts that diverge from the conversation at several positions (*cut anywhere*);
- different last turns in a batch with an unrelated prompt;
- a conversation that begins shorter than the windows; the store is reopened before each turn.

*Equal* means that log-probabilities differ in every step by at most {TOLERANCE:g} of their range.
The largest difference of an equal model is {{largest}}, except where [stock's results
differ, too](#as-in-stock). The server serves a *refused* model without the store, and says so in
the log.

`python -m models_check` repeats the test. `--only NAME` prints details of one architecture.
`--write docs/models.md` writes this page.
"""

_TURNS = """
## What a turn writes

The table shows the bytes that a turn of 500 tokens writes. Models with sliding windows or recurrent
layers also write checkpoints, but [postpone](store.md#what-happens-when) most of them.

- *In a row*: a turn of a tool loop, with 1,000 computed tokens a second and a checkpoint every two
  seconds.
- *After a rest*: the same turn, if 30 seconds pass before the next turn. Then the last checkpoint
  is written, too.
- *Nothing postponed*: the same turn, if no checkpoint is postponed.

The bytes are computed from each model's config.json, in bfloat16. In the [benchmark
`tool_turns`](benchmarks.md#settled-questions), tiny models wrote the computed number of bytes.

<!-- made: turns -->
<!-- end of turns -->
"""

_KINDS = {
    "full": "full attention",
    "sliding": "sliding windows",
    "chunked": "chunked attention",
    "recurrent": "recurrent states",
}
"""The kinds of caches in a description, and their names on the page."""
_BY_BLOCKS = "by blocks"


def line(finding: Finding) -> str:
    worst = max(finding.differences.values(), default=0.0)
    numbers = f"{worst:8.1e}" if finding.differences else " " * 8
    what = finding.reason or f"{finding.precisions}; reusable {finding.reusable}"
    return (
        f"{finding.name:32} {finding.result:8} {numbers} {finding.seconds:5.1f} s  "
        f"{finding.caches:34} stock batches: {finding.stock_batches_right:12} {what}"
    )


def summary(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.result for finding in findings)
    modules = len({module_of(finding.name) for finding in findings})
    results = ", ".join(f"{n} {result}" for result, n in sorted(counts.items()))
    return f"{len(findings)} models of {modules} modules: {results}"


def page(findings: Sequence[Finding]) -> str:
    reasons = [f"- `{finding.name}`: {finding.reason}." for finding in findings if finding.reason]
    excused = [
        f"- `{finding.name}`: {_excuse(finding)}." for finding in findings if finding.excused
    ]
    differences = [
        value
        for finding in findings
        if finding.result == "equal"
        for value in finding.differences.values()
    ]
    intro = _INTRO.format(
        mlx_lm=version("mlx-lm"),
        mlx=version("mlx"),
        summary=summary(findings),
        table=table(findings),
        largest=_number(max(differences, default=0.0)),
    )
    lines = [
        intro,
        "## Refused, or wrong\n",
        *(reasons or ["None."]),
        "\n## As in stock\n",
        "With these models, computing a prompt in pieces or in a batch changes even the stock "
        "server's\nresults. The numbers are shares of the range of log-probabilities:\n",
        *(excused or ["None."]),
        _TURNS.rstrip("\n"),
    ]
    return "\n".join(lines) + "\n"


def table(findings: Sequence[Finding]) -> str:
    """Return a table with a row for each way of storing, the most frequent first."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for finding in findings:
        if finding.result == "equal":
            resumes = "a multiple of 256" if finding.reusable == _BY_BLOCKS else "a checkpoint"
            group = _layers(finding.caches), resumes, finding.batching
            groups.setdefault(group, []).append(finding.name)
    columns = ("layers", "resumes at", "in one batch", "architectures")
    rows = [_table_row(columns), _table_row(["---"] * len(columns))]
    for group, names in sorted(groups.items(), key=lambda item: -len(item[1])):
        rows.append(_table_row([*group, ", ".join(f"`{name}`" for name in names)]))
    return "\n".join(rows)


def _layers(caches: str) -> str:
    return ", ".join(shown for kind, shown in _KINDS.items() if kind in caches)


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
