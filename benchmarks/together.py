"""Requests that arrive at the same moment: until the last has its reply, and to the first tokens.

    python -m benchmarks.together [--model synthetic:llama-3.1-8b] [--what turns agents mixed]

turns    eight conversations of 1,024 tokens that every side has in memory each go a turn further
agents   six agents with one new system prompt of 2,048 tokens; before it one with another, alone
mixed    eight new prompts of 48 to 1,536 tokens
beside   a short prompt while one of `--long` tokens is computed; before it another short one, alone

CPU seconds are those of a side's whole process, from the first request to the last reply's end:
on a shared machine they vary less than seconds on the clock. Columns over another side are medians
of the ratios within each repeat.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.support import Reply
from tests.support.synthetic import Message

from .report import Result
from .runs import Run, median, parser, ratio, run_of
from .servers import Fleet, cpu_between, rotated

SIDES = ("ours-16", "ours", "stock")
N_TURNS, CONTEXT, NEW = 8, 1024, (40, 68)
"""Conversations, the tokens that each has, and how many a turn adds: the fewest and the most."""
N_AGENTS, SYSTEM = 6, 2048
MIXED = (48, 1536, 64, 1024, 128, 512, 256, 384)
MAX_TOKENS = 20
LONG = 32768
_ALONE_S = 0.5
"""How long a long prompt is computed before a short one arrives beside it."""

Prompts = list[list[Message]]


@dataclass(frozen=True)
class Burst:
    """What came of requests that were sent at once; `alone_s` is one's first token before them."""

    replies: Sequence[Reply]
    total_s: float
    cpu_s: float | None
    alone_s: float | None = None

    @property
    def first_tokens_s(self) -> list[float]:
        return sorted(reply.ttft_s for reply in self.replies)

    @property
    def figures(self) -> dict[str, float | None]:
        """What is told of it, by the names of columns."""
        first, last = self.first_tokens_s[0], self.first_tokens_s[-1]
        return {
            "total s": self.total_s,
            "CPU s": self.cpu_s,
            "first token s": first,
            "last first token s": last,
            "alone s": self.alone_s,
            "last / alone": None if self.alone_s is None else last / self.alone_s,
        }


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(sides=list(SIDES))
    options.add_argument("--what", nargs="+", choices=SCENES, default=["turns", "agents", "mixed"])
    options.add_argument("--long", type=int, default=LONG)
    options.add_argument("--repeats", type=int, default=3)
    args = options.parse_args()
    measure(run_of(args), args.what, args.repeats, args.long).show()


def measure(run: Run, what: Sequence[str], n_repeats: int, long: int = LONG) -> Result:
    """Add rows for these scenes to the run's result."""
    with run.fleet() as fleet:
        result = run.result(
            "together",
            "Requests that arrive at the same moment.",
            {"sides": fleet.flags, "max_tokens": MAX_TOKENS, "long prompt": long},
        )
        for name in what:
            found: dict[str, list[Burst]] = defaultdict(list)
            scene, longest_s = SCENES[name](run, fleet, long), 0.0
            for repeat in range(n_repeats):
                for side in rotated(run.sides, repeat):
                    if not run.deadline.allows(longest_s):
                        result.leave_out(f"{name}, repeat {repeat} of {side}")
                        continue
                    fleet.settle(side)  # the writer's work belongs to no other's time
                    started = time.monotonic()
                    found[side].append(burst := scene(side, repeat))
                    longest_s = max(longest_s, time.monotonic() - started)
                    print(f"{name} {side}: {_told(burst)}", file=sys.stderr, flush=True)
            result.add(*(_row(name, side, found, run.sides[-1]) for side in run.sides))
    return result


def _told(burst: Burst) -> str:
    told = [f"{name} {value:.3g}" for name, value in burst.figures.items() if value is not None]
    return ", ".join(told)


def _row(name: str, side: str, found: dict[str, list[Burst]], other: str) -> dict[str, Any]:
    """Return a side's medians, and what they are over those of the last side."""
    row: dict[str, Any] = {"what": name, "side": side, "repeats": len(found[side])}
    its, others = ([burst.figures for burst in found[one]] for one in (side, other))
    for column in its[0] if its else ():
        row[column] = median([value for one in its if (value := one[column]) is not None])
    for column in ("total s", "CPU s", "first token s", "last first token s") if its else ():
        over = [one[column] or 0.0 for one in its], [one[column] or 0.0 for one in others]
        row[f"{column} / {other}"] = ratio(*over)
    replies = [reply for burst in found[side] for reply in burst.replies]
    row["reused"] = median([reply.cached_tokens for reply in replies])
    return row


def together(fleet: Fleet, side: str, prompts: Prompts, max_tokens: int) -> Burst:
    """Send prompts at once and wait for all replies."""
    before, started = fleet.used(side), time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(pool.map(lambda asked: fleet.ask(side, asked, max_tokens), prompts))
    total_s = time.perf_counter() - started
    return Burst(replies, total_s, cpu_between(before, fleet.used(side)))


def _turns(run: Run, fleet: Fleet, long: int) -> Callable[[str, int], Burst]:
    """Each repeat goes a turn further, so that its prompts are hot and its new tokens are new."""
    first = [run.prompts.of_length(CONTEXT, seed=8_500_000 + n) for n in range(N_TURNS)]
    fewest, most = NEW
    talks: dict[str, list[tuple[list[Message], Reply]]] = {}

    def scene(side: str, repeat: int) -> Burst:
        if side not in talks:
            talks[side] = [(asked, fleet.ask(side, asked, MAX_TOKENS)) for asked in first]
            fleet.settle(side)
        prompts = [
            run.prompts.next_turn(asked, reply, fewest + 7 * n % (most - fewest))
            for n, (asked, reply) in enumerate(talks[side])
        ]
        burst = together(fleet, side, prompts, MAX_TOKENS)
        talks[side] = list(zip(prompts, burst.replies, strict=True))
        return burst

    return scene


def new_agents(run: Run, n_agents: int, system_tokens: int, seed: int) -> Prompts:
    """Return the first prompts of agents that share a system prompt, unlike any other seed's."""
    content = run.prompts.of_length(system_tokens, seed)[0]["content"]
    system: Message = {"role": "system", "content": content}
    return [
        [system, {"role": "user", "content": f"You are agent {n}. What do you do first?"}]
        for n in range(n_agents)
    ]


def _agents(run: Run, fleet: Fleet, long: int) -> Callable[[str, int], Burst]:
    def scene(side: str, repeat: int) -> Burst:
        one = new_agents(run, 1, SYSTEM, 4_000_000 + repeat)
        alone = together(fleet, side, one, MAX_TOKENS)
        fleet.settle(side)
        all_of_them = new_agents(run, N_AGENTS, SYSTEM, 3_000_000 + repeat)
        return _after(alone, together(fleet, side, all_of_them, MAX_TOKENS))

    return scene


def _mixed(run: Run, fleet: Fleet, long: int) -> Callable[[str, int], Burst]:
    def scene(side: str, repeat: int) -> Burst:
        seeds = range(6_500_000 + 100 * repeat, 6_500_000 + 100 * repeat + len(MIXED))
        prompts = [run.prompts.of_length(n, seed) for n, seed in zip(MIXED, seeds, strict=True)]
        return together(fleet, side, prompts, MAX_TOKENS)

    return scene


def _beside(run: Run, fleet: Fleet, long: int) -> Callable[[str, int], Burst]:
    def scene(side: str, repeat: int) -> Burst:
        seed = 6_000_000 + 2 * repeat
        shorts = [run.prompts.of_length(64, seed + n) for n in (0, 1)]
        behind = run.prompts.of_length(long, seed=5_000_000 + repeat)
        alone = together(fleet, side, shorts[:1], 1)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(fleet.ask, side, behind, 1)
            time.sleep(alone.total_s + _ALONE_S)
            burst = together(fleet, side, shorts[1:], 1)
            other.result()
        return _after(alone, burst)

    return scene


def _after(alone: Burst, burst: Burst) -> Burst:
    return Burst(burst.replies, burst.total_s, burst.cpu_s, alone.first_tokens_s[0])


SCENES = {"turns": _turns, "agents": _agents, "mixed": _mixed, "beside": _beside}


if __name__ == "__main__":
    main()
