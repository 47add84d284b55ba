"""The measurements of each KV precision, and which precision they recommend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..cache.geometry.precision import Estimate

REFERENCE = "16"
"""The precision that the others are compared with: the model's own."""

MAX_RISE = 0.015
TARGET_NATS, TARGET_SLACK = 0.01, 1.5
"""The mean divergence that a precision should stay below, and the factor by which a text may miss
it."""


@dataclass(frozen=True)
class Needles:
    """Facts hidden in a long context: how many were tried, how many replies name the fact, and how
    many replies are the same as in the model's own precision."""

    tried: int
    found: int
    same: int


@dataclass(frozen=True)
class ToolCall:
    """Whether a reply makes a call that can be parsed, and whether the model's own precision makes
    the same call.

    Where neither makes a call, `same` says whether the replies are the same text.
    """

    parses: bool
    same: bool


@dataclass(frozen=True)
class Row:
    """The results of one precision. None where something was not tried.

    `perplexity_rise` is a share of the perplexity in the model's own precision, `agreement` the
    share of next tokens chosen as there, `divergence_nats` the mean Kullback-Leibler divergence
    from there. `bits_per_number` counts scales and biases.
    """

    precision: str
    layout: str
    bits_per_number: float
    kv_bytes_per_token: float
    perplexity: Estimate
    perplexity_rise: Estimate
    agreement: Estimate
    divergence_nats: Estimate
    needles: Needles | None
    tool_call: ToolCall | None


def recommend(rows: Sequence[Row], target_nats: float) -> tuple[str, str]:
    """Return the precision to take, and why, in words.

    It is the smallest that raises the perplexity by at most `MAX_RISE`, diverges by at most
    `TARGET_SLACK` times the target, and loses neither a fact nor a tool call that the model's own
    precision has.
    """
    own = next(row for row in rows if row.precision == REFERENCE)
    others = [row for row in rows if row is not own]
    for row in sorted(others, key=lambda row: row.kv_bytes_per_token):
        if not faults(row, own, target_nats):
            share = row.kv_bytes_per_token / own.kv_bytes_per_token
            return row.precision, (
                f"Recommended: --kvpersist-kv-bits {row.precision}. It takes {share:.0%} of the "
                f"memory, changes the perplexity by {row.perplexity_rise.value:+.2%}, chooses "
                f"{row.agreement.value:.1%} of the next tokens as the model's own precision does, "
                "and loses nothing else that was tried."
            )
    nearest = min(others, key=lambda row: row.divergence_nats.value)
    return REFERENCE, (
        f"Recommended: --kvpersist-kv-bits {REFERENCE}, the model's own precision. Even "
        f"{nearest.precision} {' and '.join(faults(nearest, own, target_nats))}."
    )


def faults(row: Row, own: Row, target_nats: float) -> list[str]:
    """Return what a precision loses, each as the end of a sentence about it."""
    found = []
    for what, estimate, limit, _ in _limits(row, target_nats):
        if estimate.value > limit:
            found.append(what)
    if row.needles and own.needles and row.needles.found < own.needles.found:
        found.append("misses a fact that the model's own precision finds")
    if row.tool_call and own.tool_call and own.tool_call.parses and not row.tool_call.parses:
        found.append("makes no tool call that can be read")
    return found


def _limits(row: Row, target_nats: float) -> Iterator[tuple[str, Estimate, float, str]]:
    """Yield what a precision does, by how much, the limit, and the limit in words."""
    rise, nats, most_nats = row.perplexity_rise, row.divergence_nats, TARGET_SLACK * target_nats
    yield f"raises the perplexity by {rise.value:.1%}", rise, MAX_RISE, f"{MAX_RISE:.1%}"
    yield f"diverges by {nats.value:.2g} nats", nats, most_nats, f"{most_nats:.2g} nats"


def caveats(rows: Sequence[Row], target_nats: float) -> list[str]:
    """Return what these measurements cannot decide."""
    own = next(row for row in rows if row.precision == REFERENCE)
    said = []
    for row in rows:
        for what, estimate, limit, in_words in _limits(row, target_nats):
            if row is not own and abs(estimate.value - limit) <= estimate.error:
                said.append(
                    f"{row.precision} {what}, and the limit of {in_words} lies within the standard "
                    "error: a longer --text would tell."
                )
    if own.needles and not own.needles.found:
        said.append(
            "Even the model's own precision finds none of the hidden facts: none can be lost."
        )
    if own.tool_call is None:
        said.append("No tool call was tried: the model's chat template shows no tools.")
    elif not own.tool_call.parses:
        said.append("Even the model's own precision makes no tool call that can be read.")
    return said
