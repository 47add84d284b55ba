"""Checks that end a run if a server does not serve as the name of its side says.

If the plugin refuses a model, the server serves it as stock does. Times alone do not show that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_lm_kvpersist.cache.blocks import BLOCK_TOKENS
from mlx_lm_kvpersist.cache.geometry.precision import layout_in_words
from mlx_lm_kvpersist.config import KV_BITS

_TEMPLATE_TOKENS = 64
"""Prompts of one chat template share at most this number of first tokens."""


class WrongMeasurement(SystemExit):
    """A server does not do the work that is measured. The run ends with this message."""


@dataclass(frozen=True)
class Expected:
    """How a measured request must be served."""

    name: str
    kinds: Collection[str]
    least: int = 0
    most: int | None = None
    tier: str | None = None


def new(n_shared: int = _TEMPLATE_TOKENS) -> Expected:
    """A prompt that no server has seen: at most `n_shared` tokens are reused."""
    return Expected("new", ("MISS", "DIVERGE"), most=n_shared)


def reused(n_tokens: int) -> Expected:
    """A prompt that repeats or continues `n_tokens` that the server has in RAM."""
    return Expected("reused", ("EXACT", "EXTEND"), least=n_tokens, tier="ram")


def repeated(n_prompt: int) -> Expected:
    """A prompt that was answered before. Its last block may be computed again."""
    kinds = ("EXACT", "EXTEND", "DIVERGE")
    return Expected("reused up to its last block", kinds, least=n_prompt - 1 - BLOCK_TOKENS)


def from_disk(n_tokens: int) -> Expected:
    """A prompt that has `n_tokens` in the store on disk."""
    return Expected("read from disk", ("EXACT", "EXTEND"), least=n_tokens, tier="disk")


SERVED = Expected("looked up", ("EXACT", "EXTEND", "DIVERGE", "MISS"))
"""Any number of tokens may be reused, but the plugin must have looked the prompt up."""


def check_outcome(
    side: str, expected: Expected, n_reused: int, outcome: Mapping[str, Any] | None
) -> None:
    """Raise WrongMeasurement unless a request was served as expected.

    outcome: the plugin's "outcome" and "tier"; None for a side without the plugin.
    """
    problems = []
    if n_reused < expected.least:
        problems.append(f"{n_reused:,} tokens were reused, at least {expected.least:,} expected")
    if expected.most is not None and n_reused > expected.most:
        problems.append(f"{n_reused:,} tokens were reused, at most {expected.most:,} expected")
    if outcome is not None:
        kind, tier = outcome.get("outcome", "none"), outcome.get("tier", "none")
        if kind not in expected.kinds:
            problems.append(f"the outcome is {kind}, not {' or '.join(expected.kinds)}")
        if expected.tier is not None and tier != expected.tier:
            problems.append(f"the tier is {tier}, not {expected.tier}")
    if problems:
        said = "; ".join(problems)
        raise WrongMeasurement(
            f"the run ends: on the side {side}, a prompt that should be {expected.name} is not: "
            f"{said}"
        )


def check_kept(side: str, spec: Mapping[str, Any], bits: str) -> None:
    """Raise WrongMeasurement if the model is refused, or a layer that grows has other bits.

    spec: the server's answer to /v1/kvpersist/spec. bits: a value of --kvpersist-kv-bits.
    """
    if not spec["kept"]:
        raise WrongMeasurement(f"the run ends: {side} refuses the model: {spec['why_not']}")
    choice = KV_BITS[bits]
    expected = f"keys {choice.key_bits} bits, values {choice.value_bits}"
    if choice.is_full_precision:
        expected = "full precision"
    grows = [group for group in spec["groups"] if group["kind"] == "full"]
    if not grows:
        raise WrongMeasurement(f"the run ends: {side} stores no layer that grows with the prompt")
    for group in grows:
        if not layout_in_words(group["bits"] or "full").startswith(expected):
            raise WrongMeasurement(
                f"the run ends: {side} stores layers in {group['bits'] or 'full precision'}, "
                f"not in {bits}: {group.get('why_not_quantized') or spec['precision']}"
            )
