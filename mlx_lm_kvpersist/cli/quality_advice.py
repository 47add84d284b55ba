"""The measurements of each KV precision, and which precision they recommend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

REFERENCE = "16"
"""The precision that the others are compared with: the model's own."""

MAX_RISE = 0.01
MIN_AGREEMENT = 0.95


@dataclass(frozen=True)
class Needles:
    """Facts hidden in a long context: how many were tried, how many replies name the fact, and how
    many replies are the same as at 16 bits."""

    tried: int
    found: int
    same: int


@dataclass(frozen=True)
class ToolCall:
    """Whether a reply makes a call that can be parsed, and whether 16 bits make the same call.

    Where neither makes a call, `same` says whether the replies are the same text.
    """

    parses: bool
    same: bool


@dataclass(frozen=True)
class Row:
    """The results of one precision. None where something was not tried.

    `perplexity_rise` is a share of the perplexity at 16 bits, `agreement` the share of next tokens
    chosen as there, `divergence_nats` the mean Kullback-Leibler divergence from there.
    """

    precision: str
    kv_bytes_per_token: float
    perplexity: float
    perplexity_rise: float
    agreement: float
    divergence_nats: float
    needles: Needles | None
    tool_call: ToolCall | None


def recommend(rows: Sequence[Row]) -> tuple[str, str]:
    """Return the precision to take, and why, in words.

    It is the smallest that raise the perplexity by at most 1%, chooses at least 95% of the next
    tokens as 16 bits do, and loses neither a fact nor a tool call that 16 bits have.
    """
    own = next(row for row in rows if row.precision == REFERENCE)
    others = [row for row in rows if row is not own]
    for row in sorted(others, key=lambda row: row.kv_bytes_per_token):
        if not faults(row, own):
            share = row.kv_bytes_per_token / own.kv_bytes_per_token
            return row.precision, (
                f"Recommended: {spelled(row.precision)}. They take {share:.0%} of the memory, "
                f"change the perplexity by {row.perplexity_rise:+.2%}, choose "
                f"{row.agreement:.1%} of the next tokens as 16 bits do, and lose nothing else "
                "that was tried."
            )
    nearest = max(others, key=lambda row: row.agreement)
    return REFERENCE, (
        f"Recommended: leave this model's cache as it is. Even {spelled(nearest.precision)} "
        f"{' and '.join(faults(nearest, own))}."
    )


def faults(row: Row, own: Row) -> list[str]:
    """Return what a precision loses, each as the end of a sentence about its bits."""
    found = []
    if row.perplexity_rise > MAX_RISE:
        found.append(f"raise the perplexity by {row.perplexity_rise:.1%}")
    if row.agreement < MIN_AGREEMENT:
        found.append(f"choose only {row.agreement:.1%} of the next tokens as 16 bits do")
    if row.needles and own.needles and row.needles.found < own.needles.found:
        found.append("miss a fact that 16 bits find")
    if row.tool_call and own.tool_call and own.tool_call.parses and not row.tool_call.parses:
        found.append("make no tool call that can be read")
    return found


def caveats(rows: Sequence[Row]) -> list[str]:
    """Return what cannot be measured because 16 bits fail, too."""
    own = next(row for row in rows if row.precision == REFERENCE)
    said = []
    if own.needles and not own.needles.found:
        said.append("Even 16 bits find none of the hidden facts, so the others cannot lose one.")
    if own.tool_call is None:
        said.append("No tool call was tried: the model's chat template shows no tools.")
    elif not own.tool_call.parses:
        said.append("Even 16 bits make no tool call that can be read, so the others lose none.")
    return said


def spelled(precision: str) -> str:
    if precision == "k8v4":
        return "8 bits for keys and 4 for values"
    return f"{precision} bits"
