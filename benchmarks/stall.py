"""How long clients that are being served wait for their next token while others want something.

    python -m benchmarks.stall [--context 8192]

Two clients decode all the time. The gaps between their tokens are measured while they are alone,
while another sends a long prompt that nobody has seen, while the writer saves what was computed for
that and in the whole second after it (there stock is the control: it writes nothing), while eight
agents with one new system prompt arrive, and, after a restart with the page cache dropped, while
the long prompt comes again (ours restores it from disk, stock computes it). When the writer was at
work is read off the times of the block files, so nothing asks the server meanwhile.

A slowdown is the mean gap over the mean gap of the same clients alone, less one. Over fewer than
20 gaps none is given.

`together` has how long those that wait for their first token wait.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support import ServerProcess
from tests.support.synthetic import Message

from .report import Result
from .runs import Run, parser, percentile, run_of
from .servers import Fleet, rotated
from .together import new_agents, together

CONTEXT = 8192
SYSTEM = 4096
N_AGENTS = 8
N_DECODING = 2
SIDES = ("ours", "ours-50ms", "stock")
"""Stock's --kv-bits is left out: it does not batch, the other client would wait for ever."""

QUIET, COLD, RESTORED = "alone", "cold prompt", "same after restart"
WRITING, AFTER = "turn being written", "the second after a cold prompt"
BURST = "eight agents"
_QUIET_S = 2.0
_AFTER_S = 1.0
_MIN_GAPS = 20
_ENDLESS = 200_000
"""Tokens that the decoding client asks for; it goes away long before."""


@dataclass
class Gaps:
    """Gaps between tokens of one side in one situation, and how long that lasted."""

    seconds: list[float] = field(default_factory=list)
    window_s: float = 0.0
    n_windows: int = 0

    def add(
        self,
        clients: Sequence[DecodingClient],
        start: float,
        stop: float,
        *,
        overlapping: bool = False,
    ) -> None:
        """Add all gaps that begin between `start` and `stop`, or that overlap that time."""
        for client in clients:
            self.seconds += client.gaps(start, stop, overlapping=overlapping)
        self.window_s += stop - start
        self.n_windows += 1


class DecodingClient:
    """Asks for an endless reply and notes when each token comes, for a `with` block."""

    def __init__(self, server: ServerProcess, messages: list[Message]) -> None:
        self._server = server
        self._body = {
            "messages": messages,
            "max_tokens": _ENDLESS,
            "temperature": 0.0,
            "stream": True,
        }
        self._times: list[float] = []
        self._begun = threading.Event()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._error: BaseException | None = None

    def __enter__(self) -> DecodingClient:
        self._thread.start()
        self._begun.wait(600)
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _read(self) -> None:
        try:
            events = self._server.events("/v1/chat/completions", self._body)
            for _, content in events:
                self._times.append(time.time())
                self._begun.set()
                if self._leaving.is_set() or content == "[DONE]":
                    break
            events.close()  # type: ignore[attr-defined]
        except BaseException as error:
            self._error = error
            self._begun.set()

    def gaps(self, start: float, stop: float, *, overlapping: bool = False) -> list[float]:
        """Return the gaps of a time; the clock is `time.time()`, as files have it."""
        pairs = pairwise(list(self._times))
        return [b - a for a, b in pairs if a < stop and (b if overlapping else a) > start]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--context", type=int, default=CONTEXT)
    options.add_argument("--repeats", type=int, default=3)
    args = options.parse_args()
    measure(run_of(args), args.context, args.repeats).show()


def measure(run: Run, context: int, n_repeats: int) -> Result:
    """Add rows for this context to the run's result."""
    sides = [side for side in run.sides if side in SIDES]
    found: dict[tuple[str, str], Gaps] = defaultdict(Gaps)
    with run.fleet(sides) as fleet:
        result = run.result(
            "stall",
            "Milliseconds between two tokens of a client, while others want something.",
            {"sides": fleet.flags},
        )
        # Quiet before and after, the prompt, and what is written of it.
        longest_s = run.costs.of(context) + 2 * _QUIET_S + 3
        if not run.deadline.allows(longest_s * len(sides) * n_repeats):
            result.leave_out(f"stall at {context:,}")
            return result
        for situation in (COLD, RESTORED):
            if situation == RESTORED:
                if not run.deadline.allows(2 * fleet.start_s + longest_s * len(sides) * n_repeats):
                    result.leave_out(f"stall, {RESTORED}")
                    break
                share = fleet.restart(drop_page_cache=True)
                result.content["setting"]["page cache left after dropping"] = share
            for repeat in range(n_repeats):
                for side in rotated(sides, repeat):
                    started = time.monotonic()
                    _serve(run, fleet, side, context, repeat, situation, found)
                    if situation == COLD:
                        _serve_burst(run, fleet, side, repeat, found)
                    longest_s = max(longest_s, time.monotonic() - started)
        for situation in (QUIET, COLD, WRITING, AFTER, BURST, RESTORED):
            for side in sides:
                if found[side, situation].seconds:
                    result.add(_row(context, side, situation, found))
    return result


def _serve(
    run: Run,
    fleet: Fleet,
    side: str,
    context: int,
    repeat: int,
    situation: str,
    found: dict[tuple[str, str], Gaps],
) -> None:
    long = run.prompts.of_length(context, seed=9_000_000 + repeat)
    with _decoding(run, fleet, side, repeat) as clients:
        began = time.time()
        time.sleep(_QUIET_S)
        sent = time.time()
        found[side, QUIET].add(clients, began, sent)
        reply = fleet.ask(side, long, 1)
        answered = sent + reply.ttft_s
        written = _wait_for_files(fleet.store(side), sent)
        time.sleep(max(0.0, answered + _AFTER_S - time.time()))
        found[side, situation].add(clients, sent, answered, overlapping=True)
        if situation == COLD:
            found[side, AFTER].add(clients, answered, answered + _AFTER_S)
            if fleet.sides[side].keeps and written > answered:
                found[side, WRITING].add(clients, answered, written)
        quiet_again = time.time()
        time.sleep(_QUIET_S)
        found[side, QUIET].add(clients, quiet_again, time.time())
    fleet.settle(side)


@contextmanager
def _decoding(
    run: Run, fleet: Fleet, side: str, repeat: int
) -> Iterator[tuple[DecodingClient, ...]]:
    """Keep some clients decoding while the block runs."""
    with ExitStack() as stack:
        yield tuple(
            stack.enter_context(
                DecodingClient(
                    fleet[side], run.prompts.of_length(64, seed=8_000_000 + 100 * n + repeat)
                )
            )
            for n in range(N_DECODING)
        )


def _serve_burst(
    run: Run,
    fleet: Fleet,
    side: str,
    repeat: int,
    found: dict[tuple[str, str], Gaps],
) -> None:
    with _decoding(run, fleet, side, repeat) as clients:
        sent = time.time()
        together(fleet, side, new_agents(run, N_AGENTS, SYSTEM, 7_000_000 + repeat), 1)
        found[side, BURST].add(clients, sent, time.time(), overlapping=True)
    fleet.settle(side)


def _wait_for_files(store: Path, since: float, quiet_s: float = 0.5) -> float:
    """Return when the last block file was written, once no more have come for a while."""
    last, seen = since, time.monotonic()
    while time.monotonic() - seen < quiet_s:
        times = [path.stat().st_mtime for path in store.glob("blocks/*/[!.]*")]
        newest = max(times, default=since)
        if newest > last:
            last, seen = newest, time.monotonic()
        time.sleep(quiet_s / 4)
    return last


def _row(
    context: int, side: str, situation: str, found: dict[tuple[str, str], Gaps]
) -> dict[str, Any]:
    gaps, quiet = found[side, situation], found[side, QUIET]

    def ms(value: float | None) -> float | None:
        return None if value is None else value * 1e3

    return {
        "context": context,
        "while": situation,
        "side": side,
        "gaps": len(gaps.seconds),
        "p50 ms": ms(percentile(gaps.seconds, 0.5)),
        "p95 ms": ms(percentile(gaps.seconds, 0.95)),
        "p99 ms": ms(percentile(gaps.seconds, 0.99)),
        "max ms": ms(max(gaps.seconds)),
        "lasted s": gaps.window_s / gaps.n_windows,
        "slowdown": _mean(gaps.seconds) / _mean(quiet.seconds) - 1
        if len(gaps.seconds) >= _MIN_GAPS
        else None,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
