"""How long a running reply waits for its next token while a long new prompt is computed."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

from tests.support import ServerError
from tests.support.synthetic import Message

from .checks import new
from .runs import Run, tokens
from .servers import BenchmarkServer, rotated

QUESTION = "longest gap"
_ENDLESS = 200_000
"""The reply's limit of tokens. Its client disconnects long before the end."""
_ALONE_S = 1.0
"""How long the reply runs before the long prompt arrives."""


class RunningReply:
    """A client, for a `with` block, that asks for an endless reply.

    `times`: when each token came, in seconds of time.perf_counter().
    """

    def __init__(self, server: BenchmarkServer, messages: list[Message]) -> None:
        self._server = server
        self._body = {
            "messages": messages,
            "max_tokens": _ENDLESS,
            "temperature": 0,
            "stream": True,
        }
        self.times: list[float] = []
        self._has_begun = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._error: BaseException | None = None

    def __enter__(self) -> RunningReply:
        self._thread.start()
        self._has_begun.wait(600)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _read(self) -> None:
        try:
            events = self._server.events("/v1/chat/completions", self._body)
            for _, content in events:
                if content == "[DONE]" and not self._is_over.is_set():
                    raise ServerError("the running reply ended before the long prompt was computed")
                self.times.append(time.perf_counter())
                self._has_begun.set()
                if self._is_over.is_set():
                    break
            events.close()
        except BaseException as error:
            self._error = error
            self._has_begun.set()

    def longest_gap_s(self, start: float, stop: float) -> float:
        """Return the longest pause between two tokens that overlaps the given time."""
        gaps = [b - a for a, b in pairwise(list(self.times)) if a < stop and b > start]
        if not gaps:
            raise RuntimeError("the running reply had no token while the prompt was computed")
        return max(gaps)


def measure(run: Run, context: int, n_repeats: int) -> None:
    """`context`: the tokens of the new prompt."""
    sides = run.sides()
    with run.fleet(sides) as fleet:
        for repeat in range(n_repeats):
            long = run.prompts.of_length(context, seed=9_000_000 + repeat)
            short = run.prompts.of_length(64, seed=8_000_000 + repeat)
            for side in rotated(sides, repeat):
                with RunningReply(fleet[side], short) as reply:
                    time.sleep(_ALONE_S)
                    sent_s = time.perf_counter()
                    answer = fleet[side].ask(long, 1, new())
                    stop_s = sent_s + answer.ttft_s
                    time.sleep(_ALONE_S / 2)  # so that the token after the last pause has come, too
                gap_s = reply.longest_gap_s(sent_s, stop_s)
                run.report.add(QUESTION, f"during {tokens(context)}", side, "s", gap_s)
                fleet[side].settle()
    run.report.note(
        QUESTION, "A reply of one client runs while another client's prompt is computed."
    )
