"""Requests that arrive at the same moment: next turns of conversations, and new agents.

turns    each conversation of 1,024 tokens, which every side has in RAM, continues by one turn
agents   one agent begins alone; then six agents begin together with another new system prompt
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.support import Reply
from tests.support.synthetic import Message

from .checks import SERVED, Expected, WrongMeasurement, new, reused
from .runs import Run, tokens
from .servers import OURS, OURS_16, STOCK, BenchmarkServer, Fleet, rotated

QUESTION = "together"
TURNS_SIDES = (OURS, OURS_16, STOCK)
N_TURNS, CONTEXT, NEW = 8, 1024, range(40, 68)
"""The number of conversations, the tokens of each, and the tokens that a turn adds."""
N_AGENTS = 6
MAX_TOKENS = 20
ALL_TURNS = "eight next turns, to the last reply's end"
ALONE, LAST = "one new agent alone", "the last of six new agents"

Prompts = list[list[Message]]


def measure(run: Run, system: int, agents_sides: Sequence[str], n_repeats: int) -> None:
    """`system`: the number of tokens of the agents' system prompt."""
    with run.fleet(run.sides(TURNS_SIDES)) as fleet:
        _measure_turns(run, fleet, n_repeats)
        for repeat in range(n_repeats):
            for side in rotated(run.sides(agents_sides), repeat):
                _measure_agents(run, fleet[side], system, repeat)
    run.report.note(
        QUESTION,
        f"The turns add {NEW.start} to {NEW.stop} tokens to conversations of {tokens(CONTEXT)}; "
        f"replies have {MAX_TOKENS}. The agents share a system prompt of {tokens(system)} tokens "
        "and wait for the first token. With the plugin, the row of the six agents is divided by "
        "the row of one new agent alone.",
    )


def _measure_turns(run: Run, fleet: Fleet, n_repeats: int) -> None:
    """Each repeat adds one turn to each conversation; all but its new tokens are in RAM."""
    first = [run.prompts.of_length(CONTEXT, seed=8_500_000 + n) for n in range(N_TURNS)]
    talks = {
        side: [(asked, fleet[side].ask(asked, MAX_TOKENS, new())) for asked in first]
        for side in fleet.sides
    }
    for repeat in range(n_repeats):
        for side in rotated(fleet.sides, repeat):
            fleet[side].settle()
            prompts = [
                run.prompts.next_turn(asked, reply, NEW[7 * n % len(NEW)])
                for n, (asked, reply) in enumerate(talks[side])
            ]
            # At least the earlier turn's prompt is reused, except the template's end.
            least = min(reply.prompt_tokens for _, reply in talks[side]) - 32
            started = time.perf_counter()
            replies = at_once(fleet[side], prompts, reused(least))
            run.report.add(QUESTION, ALL_TURNS, side, "s", time.perf_counter() - started)
            talks[side] = list(zip(prompts, replies, strict=True))


def _measure_agents(run: Run, server: BenchmarkServer, system: int, repeat: int) -> None:
    server.settle()
    alone = at_once(server, new_agents(run, 1, system, 4_000_000 + repeat), new())
    server.settle()
    replies = at_once(server, new_agents(run, N_AGENTS, system, 3_000_000 + repeat), SERVED)
    if server.side.bits is not None:
        # All agents except the first reuse the system prompt.
        n_reused = sum(reply.cached_tokens for reply in replies)
        if n_reused < 0.9 * system * (N_AGENTS - 1):
            raise WrongMeasurement(
                f"the run ends: on the side {server.side.name}, six agents with one system prompt "
                f"reused only {n_reused:,} tokens"
            )
    run.report.add(QUESTION, ALONE, server.side.name, "s", alone[0].ttft_s)
    run.report.add(QUESTION, LAST, server.side.name, "s", max(reply.ttft_s for reply in replies))


def at_once(server: BenchmarkServer, prompts: Prompts, expected: Expected) -> list[Reply]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda asked: server.ask(asked, MAX_TOKENS, expected), prompts))


def new_agents(run: Run, n_agents: int, system_tokens: int, seed: int) -> Prompts:
    content = run.prompts.of_length(system_tokens, seed)[0]["content"]
    system: Message = {"role": "system", "content": content}
    return [
        [system, {"role": "user", "content": f"You are agent {n}. What do you do first?"}]
        for n in range(n_agents)
    ]
