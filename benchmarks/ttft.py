"""Time to the first token: new prompt, same prompt again, next turn, next turn after a restart.

A conversation is a new prompt, the same prompt again, and some more turns. Then the plugin's server
restarts without its store in the page cache, and serves the last turn from disk. A restart of the
stock server loses all prompts, so this turn is compared with stock's new prompts.

`n_ranks` processes compute each server's model together, as `mlx.launch` starts them.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.support import Reply
from tests.support.synthetic import Message

from .checks import from_disk, new, reused
from .runs import Run, tokens
from .servers import STOCK, BenchmarkServer, Fleet, rotated

QUESTION = "first token"
N_NEW = 64
"""Tokens that the next turn adds, without the reply."""
MAX_TOKENS = 8
"""Length of the replies to new prompts and next turns. Other replies have one token."""
N_AGAIN = 3
"""How many times each new prompt is sent again."""
N_SHORTER = 128
"""A prompt named 8K has this number of tokens less, so that it ends in the middle of a block."""
_SLACK = 32
"""The number of tokens at a prompt's end that the next turn may change."""


def measure(
    run: Run,
    contexts: Mapping[int, int],
    n_ranks: int = 1,
    n_turns: int = 3,
    *,
    one_by_one: bool = False,
) -> None:
    """`contexts` maps lengths of prompts to the number of repeats, each with `n_turns` turns.

    one_by_one: the server of a side stops before the server of the next side starts.
    """
    sides = run.sides()
    for group in [[side] for side in sides] if one_by_one else [sides]:
        with run.fleet(group, n_ranks) as fleet:
            _measure(run, fleet, contexts, n_ranks, n_turns)


def _measure(
    run: Run, fleet: Fleet, contexts: Mapping[int, int], n_ranks: int, n_turns: int
) -> None:
    names = {n: tokens(n) + (f", {n_ranks} ranks" if n_ranks > 1 else "") for n in contexts}
    talks: dict[tuple[int, int, str], list[Message]] = {}
    for context, n_repeats in contexts.items():
        for repeat in range(n_repeats):
            n_tokens = context - N_SHORTER
            prompt = run.prompts.of_length(n_tokens, seed=1000 * context + repeat)
            for side in rotated(fleet.sides, repeat):
                talk = _converse(run, fleet[side], prompt, context, names[context], n_turns)
                if side != STOCK:
                    talks[context, repeat, side] = talk
    if not talks:
        return
    share = fleet.restart()
    left = "cannot be dropped here" if share is None else f"still had {share:.0%} of the store"
    run.report.note(
        QUESTION,
        f"New prompts have {N_SHORTER} tokens less than their names say, so they end in the "
        f"middle of a block of 256. Each is sent {N_AGAIN} times again. The next turns "
        f"({n_turns} per new prompt) add {N_NEW} tokens and a reply of {MAX_TOKENS}; some "
        "cross the end of a block. After a restart, the last turn is read from disk; the page "
        f"cache {left}. These rows are compared with stock's new prompt. Each server that "
        "starts answers one short prompt first, which compiles its kernels."
        + (f" Ranks: {n_ranks} processes that MLX's ring connects." if n_ranks > 1 else ""),
    )
    for (context, _, side), talk in talks.items():
        n_stored = run.prompts.count(talk) - _SLACK
        reply = fleet[side].ask(talk, 1, from_disk(n_stored))
        _add(run, f"after a restart, {names[context]}", side, reply)


def _converse(
    run: Run,
    server: BenchmarkServer,
    prompt: list[Message],
    context: int,
    name: str,
    n_turns: int,
) -> list[Message]:
    """Return the prompt of the conversation's last turn."""
    side = server.side.name
    n_tokens = context - N_SHORTER
    asked, reply = prompt, server.ask(prompt, MAX_TOKENS, new())
    _add(run, f"new prompt, {name}", side, reply)
    server.settle()  # so that no other sample includes the writer's work
    for _ in range(N_AGAIN):
        again = server.ask(prompt, 1, reused(n_tokens - 1))
        _add(run, f"same prompt again, {name}", side, again)
    for _ in range(n_turns):
        n_before = run.prompts.count(asked)
        asked = run.prompts.next_turn(asked, reply, N_NEW)
        reply = server.ask(asked, MAX_TOKENS, reused(n_before - _SLACK))
        _add(run, f"next turn, {name}", side, reply)
        server.settle()
    return asked


def _add(run: Run, what: str, side: str, reply: Reply) -> None:
    run.report.add(QUESTION, what, side, "s", reply.ttft_s)
