"""Run the workload under which Macs were reported to panic, and watch the server's memory.

    python -m benchmarks.soak --model MODEL [--minutes 5] [--json FILE]

Two streams send requests: a new prompt of 12,000 to 16,000 tokens, or one more turn of an earlier
conversation. Replies are short or long. The budgets are small, so blocks are evicted, written and
read all the time. The report is https://github.com/ml-explore/mlx/issues/3186.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import TextIO

from mlx_lm_kvpersist.api.admin import SPEC_PATH, STATS_PATH
from mlx_lm_kvpersist.cli.bench import fetched, measured_conditions
from mlx_lm_kvpersist.cli.machine import conditions
from mlx_lm_kvpersist.cli.output import ongoing
from mlx_lm_kvpersist.cli.servers import Message, Reply, StartedServer, ask, document
from mlx_lm_kvpersist.config import DEFAULT_BITS
from mlx_lm_kvpersist.errors import KVPersistError
from mlx_lm_kvpersist.host.scheduling.model_provider import max_context
from mlx_lm_kvpersist.units import show_bytes

from .checks import check_kept

STREAMS = 2
MOST_TOKENS = 16_384
"""Tokens of the longest new prompts; the shortest have three quarters of this number."""
BUDGETS = ("--kvpersist-ram", "256M", "--kvpersist-disk", "8G", "--kvpersist-min-free", "512M")
_REPLY_TOKENS = (16, 256)
_KEPT, _MOST_TURNS = 6, 4
"""The number of conversations that a stream may continue, and the maximum turns of each."""
_KNOWN = ("caches", "pool", "held", "unused")
_GREW = 1.1
_SLACK_BYTES = 64 << 20
"""A server grows if its median memory rises by more than a tenth plus this number of bytes."""
_LEAST_SAMPLES = 12


def memory_of(pid: int) -> int:
    """Return a process's resident bytes; 0 if unknown. A Mac's number includes GPU memory.

    Raises OSError if the process has ended.
    """
    if sys.platform == "darwin":
        # struct rusage_info_v0 of sys/resource.h: after the UUID (16 bytes) the eighth number is
        # ri_phys_footprint.
        usage = (ctypes.c_uint64 * 12)()
        ctypes.CDLL(None).proc_pid_rusage(pid, 0, ctypes.byref(usage))
        return usage[9]
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])


@dataclass
class Soak:
    """One run, and its samples so far.

    model: the model's folder. options: the server's options. n_tokens: the length of the longest
    new prompts. log: gets a line of JSON for each sample. The line is written to disk at once,
    because nothing else survives a panic.
    """

    model: str
    folder: Path
    options: Sequence[str]
    n_tokens: int = MOST_TOKENS
    log: TextIO | None = None
    samples: list[int] = field(default_factory=list)
    """Bytes of memory without the conversations and the freed buffers that MLX keeps."""
    most_bytes: int = 0
    replies: list[Reply] = field(default_factory=list)
    n_evicted: int = 0
    _chars_per_token: float = 2.0
    _ends_s: float = 0.0

    def run(self, seconds: float, every_s: float = 1.0) -> None:
        """Raises KVPersistError if the server fails or its memory grows."""
        command = (self.model, "--plugin", "kvpersist", "--kvpersist-dir", f"{self.folder}/store")
        with ongoing("soak: start") as say, ThreadPoolExecutor(STREAMS) as pool:
            log_path = self.folder / "log"
            with StartedServer(*command, *self.options, log_path=log_path) as server:
                check_kept("soak", ask(server.url, SPEC_PATH), DEFAULT_BITS)
                self._ends_s = time.monotonic() + seconds
                streams = [pool.submit(self._stream, server, n) for n in range(STREAMS)]
                try:
                    while self._left_s and not any(stream.done() for stream in streams):
                        say(self._sample(server))
                        wait(streams, min(every_s, self._left_s), FIRST_COMPLETED)
                finally:
                    self._ends_s = 0.0  # the server ends, so errors of requests do not count
            for stream in streams:
                stream.result()
        if not self.replies:
            raise KVPersistError(f"no request was served in {seconds:.0f} s; choose more --minutes")
        if self.grew:
            raise KVPersistError("the server's memory grows during the run")

    @property
    def grew(self) -> bool:
        """Compare the second with the last quarter of the samples."""
        before, after = self._quarters()
        return len(self.samples) >= _LEAST_SAMPLES and after > _GREW * before + _SLACK_BYTES

    def _quarters(self) -> tuple[int, int]:
        n = -(-len(self.samples) // 4)
        second, last = self.samples[n : 2 * n] or [0], self.samples[-n:] or [0]
        return median_low(second), median_low(last)

    @property
    def _left_s(self) -> float:
        return max(0.0, self._ends_s - time.monotonic())

    def _stream(self, server: StartedServer, number: int) -> None:
        rng = random.Random(number)
        kept: deque[list[Message]] = deque(maxlen=_KEPT)
        while self._left_s:
            if kept and rng.random() < 0.5:
                messages, question = rng.choice(kept), "Go on."
                if len(messages) + 2 >= 2 * _MOST_TURNS:
                    kept.remove(messages)
            else:
                n_chars = int(rng.uniform(0.75, 1.0) * self.n_tokens * self._chars_per_token)
                messages, question = [], f"Prompt {rng.random()}.\n\n{document(n_chars)}"
                kept.append(messages)
            messages.append({"role": "user", "content": question})
            try:
                reply = server.chat(messages, None, rng.choice(_REPLY_TOKENS))
            except KVPersistError:
                if not self._left_s:
                    return
                raise
            messages.append({"role": "assistant", "content": reply.text})
            self.replies.append(reply)
            if len(messages) == 2:
                self._chars_per_token = len(question) / reply.prompt_tokens

    def _sample(self, server: StartedServer) -> str:
        """Take a sample; return a line about the run so far."""
        try:
            stats = ask(server.url, STATS_PATH)
            n_bytes = memory_of(server.pid)
        except (OSError, KVPersistError) as error:
            raise server.failure(str(error)) from error
        self.n_evicted = sum(tier["evicted"] for tier in stats["store"]["tiers"].values())
        self.most_bytes = max(self.most_bytes, n_bytes)
        known = sum((stats["memory"] or {}).get(part, 0) for part in _KNOWN)
        self.samples.append(max(0, n_bytes - known))
        left_s, n_requests = round(self._left_s), len(self.replies)
        if self.log is not None:
            seen = {"left_s": left_s, "requests": n_requests, "evicted": self.n_evicted}
            print(json.dumps({**seen, "memory_bytes": self.samples[-1]}), file=self.log, flush=True)
            os.fsync(self.log.fileno())
        return f"soak: {left_s} s left, {n_requests} requests, {show_bytes(self.samples[-1])}"

    def seen(self) -> str:
        n_reused = sum(each.cached_tokens for each in self.replies)
        n_computed = sum(each.prompt_tokens for each in self.replies) - n_reused
        quarters = " and ".join(map(show_bytes, self._quarters()))
        return (
            f"{len(self.replies)} requests, {n_computed:,} tokens computed and {n_reused:,} "
            f"reused, {self.n_evicted:,} blocks and checkpoints evicted; the server's memory was "
            f"{show_bytes(self.most_bytes)} at most; without conversations it was {quarters} in "
            "the second and the last quarter of the run"
        )


def soak(path: Path, minutes: float, log_path: Path | None = None) -> None:
    """Run the workload; print one line to send, also if the server fails.

    log_path: a file that gets every sample. Raises KVPersistError if the server fails or its
    memory grows.
    """
    result, started = "stopped", measured_conditions(str(path), path)
    room = max_context(str(path), None) or 2 * MOST_TOKENS
    with (
        tempfile.TemporaryDirectory(prefix="kvpersist-soak-") as folder,
        log_path.open("w", encoding="utf-8") if log_path else nullcontext() as log,
    ):
        run = Soak(str(path), Path(folder), BUDGETS, min(MOST_TOKENS, 3 * room // 4), log)
        try:
            run.run(60 * minutes, every_s=1.0 if sys.stderr.isatty() else 10.0)
            result = f"passed {minutes:g} min" + ("" if run.n_evicted else ", no block was evicted")
        except KVPersistError as error:
            result = f"failed: {str(error).partition(chr(10))[0]}"
            raise
        finally:
            print("; ".join((f"soak: {result}", run.seen(), *conditions(started))))


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--model", required=True, help="a folder, or a name on the hub")
    options.add_argument("--minutes", type=float, default=5.0)
    options.add_argument("--json", type=Path, metavar="FILE", help="also write each sample to FILE")
    args = options.parse_args()
    try:
        soak(fetched(args.model), args.minutes, args.json)
    except KVPersistError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
