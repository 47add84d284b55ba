"""Time to the first token: cold, again, one turn further, and after the server was restarted.

    python -m benchmarks.ttft [--model synthetic:llama-3.1-8b] [--contexts 1024 8192 32768]

Each side is a real server. The states, the same for all sides:

cold     a prompt that no side has seen
hot      the same prompt again
extend   the conversation goes on: the reply, and 64 tokens more
restart, disk    every server ended and started again, the kernel's page cache of the store dropped;
                 the last prompt of the conversation again, as it went on
restart, cache   the same, page cache left as it is; stock keeps nothing on disk, and is not asked

Sides take turns within each repeat, so that what slows the machine down slows all of them. CPU
seconds are those of a side's whole process, from the request to the reply's end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.support import Reply
from tests.support.synthetic import Message

from .report import Result
from .runs import Run, median, parser, ratio, run_of
from .servers import Fleet, cpu_between, rotated

CONTEXTS = (1024, 4096, 8192)
N_NEW = 64
MAX_TOKENS = 8
"""Length of the reply that the next turn continues. All other replies have one token: with random
weights the first text can come some tokens after the first token."""
COLD, HOT, EXTEND = "cold", "hot", "extend"
FROM_DISK, FROM_CACHE = "restart, disk", "restart, cache"


@dataclass(frozen=True)
class Sample:
    """A reply, and the CPU seconds that it took; None where a server could not tell."""

    reply: Reply
    cpu_s: float | None


Samples = dict[tuple[int, str, str], list[Sample]]
"""By context, state and side, in the order of the repeats."""

Talks = dict[tuple[int, int, str], list[Message]]
"""The last prompt of each conversation, by context, repeat and side."""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    options.add_argument("--repeats", type=int, default=3)
    args = options.parse_args()
    measure(run_of(args), args.contexts, args.repeats).show()


def measure(run: Run, contexts: Sequence[int], n_repeats: int) -> Result:
    """Add rows for these contexts to the run's result."""
    with run.fleet() as fleet:
        result = run.result(
            "ttft",
            "Seconds to the first token of a prompt.",
            {"new tokens of a turn": N_NEW, "max_tokens": MAX_TOKENS, "sides": fleet.flags},
        )
        samples: Samples = defaultdict(list)
        talks: Talks = {}
        done: list[int] = []
        for context in contexts:
            # What is measured now is measured again after the restart.
            if not run.deadline.allows(
                run.costs.of(context) * n_repeats * (2 * len(run.sides) - 1)
            ):
                result.leave_out(f"ttft at {context:,}")
                continue
            for repeat in range(n_repeats):
                _serve_new(run, fleet, context, repeat, samples, talks)
            done.append(context)
            result.add(*(_row(run, samples, context, state) for state in (COLD, HOT, EXTEND)))
        for state in (FROM_DISK, FROM_CACHE) if done else ():
            _after_restart(run, fleet, done, n_repeats, state, samples, talks, result)
    return result


def _serve_new(
    run: Run, fleet: Fleet, context: int, repeat: int, samples: Samples, talks: Talks
) -> None:
    messages = run.prompts.of_length(context, seed=1000 * context + repeat)
    for side in rotated(run.sides, repeat):
        first = _ask(fleet, side, messages, MAX_TOKENS)
        cold = first.reply
        if cold.cached_tokens > context // 2:
            raise RuntimeError(f"{side}: a cold prompt was not cold, {cold.cached_tokens} reused")
        # The writer's work belongs to no other side's time.
        fleet.settle(side)
        longer = run.prompts.next_turn(messages, cold, N_NEW)
        talks[context, repeat, side] = longer
        hot, extended = (_ask(fleet, side, asked, 1) for asked in (messages, longer))
        fleet.settle(side)
        for state, sample in ((COLD, first), (HOT, hot), (EXTEND, extended)):
            samples[context, state, side].append(sample)
        run.costs.learn(cold)


def _ask(fleet: Fleet, side: str, messages: list[Message], max_tokens: int) -> Sample:
    before = fleet.used(side)
    reply = fleet.ask(side, messages, max_tokens)
    return Sample(reply, cpu_between(before, fleet.used(side)))


def _after_restart(
    run: Run,
    fleet: Fleet,
    contexts: Sequence[int],
    n_repeats: int,
    state: str,
    samples: Samples,
    talks: Talks,
    result: Result,
) -> None:
    sides = [side for side in run.sides if state == FROM_DISK or fleet.sides[side].keeps]
    recomputing = [side for side in sides if not fleet.sides[side].keeps]
    if not run.deadline.allows(2 * fleet.start_s):
        result.leave_out(f"ttft, {state}")
        return
    share_left = fleet.restart(drop_page_cache=state == FROM_DISK)
    result.content["setting"]["start of all servers, s"] = round(fleet.start_s, 1)
    if state == FROM_DISK:
        # None: this system drops nothing; then "disk" means whatever the page cache held.
        result.content["setting"]["page cache left after dropping"] = share_left
    for context in contexts:
        if not run.deadline.allows(run.costs.of(context) * n_repeats * (len(recomputing) + 0.5)):
            result.leave_out(f"ttft at {context:,}, {state}")
            continue
        for repeat in range(n_repeats):
            for side in rotated(sides, repeat):
                asked = talks[context, repeat, side]
                samples[context, state, side].append(_ask(fleet, side, asked, 1))
        result.add(_row(run, samples, context, state))


def _row(run: Run, samples: Samples, context: int, state: str) -> dict[str, Any]:
    """Return medians by side, and what ours is over the others and over its own cold start."""
    row: dict[str, Any] = {"context": context, "state": state}
    of = {side: samples[context, state, side] for side in run.sides}
    times = {side: [sample.reply.ttft_s for sample in of[side]] for side in run.sides}
    row["repeats"] = max(map(len, times.values()))
    for side in run.sides:
        row[f"{side} s"] = median(times[side])
    for side in run.sides:
        row[f"{side} CPU s"] = median([x.cpu_s for x in of[side] if x.cpu_s is not None])
    for side in run.sides:
        row[f"{side} reused"] = median([sample.reply.cached_tokens for sample in of[side]])
    first = run.sides[0]
    for other in run.sides[1:]:
        row[f"{first} / {other}"] = ratio(times[first], times[other])
    cold = [sample.reply.ttft_s for sample in samples[context, COLD, first]]
    row[f"{first} / its cold"] = ratio(times[first], cold)
    headers = {sample.reply.kvpersist.get("outcome", "") for sample in of[first]}
    row["outcome"] = " ".join(sorted(headers))
    return row


if __name__ == "__main__":
    main()
