"""Stock's own results with a model: whether it runs, and its faults.

The checks use mlx-lm's models and batch generator, so our caches show their faults, too.
"""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from .compare import compare, worst
from .conversation import N_STRANGER, random_ids
from .drive import Reply, Row, alone, can_batch, generate, plainly

NOT_JOINTLY = "one by one"
"""Stock is right about prompts that join a batch one by one, and wrong about padded prompts."""


class StockFails(Exception):
    """mlx-lm cannot generate with this model as its server would."""


def batches_right(model: Any) -> str:
    """Say whether two prompts get the same replies in a batch as alone, with stock's caches.

    Raises StockFails if a prompt alone fails, or the next turn over its caches.
    """
    prompts = [random_ids(5, 90), random_ids(6, N_STRANGER)]
    try:
        single = [alone(model, Row([ids], make_prompt_cache(model))) for ids in prompts]
        first = alone(model, Row([prompts[0]], make_prompt_cache(model)))
        next_turn = [*first.tokens, *prompts[1]]
        alone(model, Row([next_turn], first.caches, len(first.tokens)))
    except Exception as error:
        raise StockFails(f"{type(error).__name__}: {error}") from error
    if not can_batch(make_prompt_cache(model)):
        return "never batches"
    answers = [_together(model, prompts, single, joint) for joint in (True, False)]
    return NOT_JOINTLY if answers[0] != "yes" == answers[1] else answers[1]


def _together(model: Any, prompts: list[list[int]], single: list[Reply], joint: bool) -> str:
    rows = [
        Row([ids], make_prompt_cache(model), reply=reply.ids)
        for ids, reply in zip(prompts, single, strict=True)
    ]
    try:
        together = generate(model, rows, joint=joint, padded=True)
    except Exception as error:
        return f"no, {type(error).__name__}"
    pairs = zip(single, together, strict=True)
    return "yes" if worst([compare(a.logprobs, b.logprobs) for a, b in pairs]).is_equal else "no"


def difference_of_pieces(model: Any, segments: list[list[int]], reply: list[int]) -> float:
    """Compare the logits of a prompt computed in its segments and at once."""
    all_ids = [token for segment in segments for token in segment]
    pieces, at_once = (
        plainly(model, Row(prompt, make_prompt_cache(model), reply=reply))
        for prompt in (segments, [all_ids])
    )
    return compare(pieces.logprobs, at_once.logprobs).difference
