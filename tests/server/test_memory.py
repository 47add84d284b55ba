"""If all clients together need more than the memory budget, it is kept, and no reply changes.

`KVPERSIST_TURNS=300 KVPERSIST_TOKENS=4000` makes the first test long.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load

from mlx_lm_kvpersist.cache.geometry.precision import PrecisionChoice
from mlx_lm_kvpersist.cache.geometry.spec import probe_model
from mlx_lm_kvpersist.cache.measuring.prefill_memory import SequenceMemory
from mlx_lm_kvpersist.request.memory import GROWTH, MORE
from models_check.configs import CONFIGS
from tests.support import (
    FULL_PRECISION,
    Message,
    ServerProcess,
    StartServer,
    make_zoo_model,
    synthetic_text,
)
from tests.support.zoo import whole_characters

from .stored import wait_for_writer
from .test_crowd import resident_bytes

MIB = 1 << 20
N_SESSIONS, N_CLIENTS, N_FIT = 12, 8, 5
N_TURNS = int(os.environ.get("KVPERSIST_TURNS", "36"))
N_TOKENS = int(os.environ.get("KVPERSIST_TOKENS", "600"))
LONG_REPLY, REPLY = 900, 16
CHARS_PER_TOKEN = 1.2
LARGE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 32_768,
}
"""8 or 16 KiB per token: a few conversations fill a budget of some hundred MiB."""
LEFT_BYTES = 128 * MIB
"""The memory that a process may use beyond the account."""
MALLOC_ENV = {"MALLOC_MMAP_THRESHOLD_": "1048576"}
"""Without it, glibc keeps freed arrays on a CPU, up to the budget again; see docs/disk.md."""
LAUNCHER = """
import signal
import sys
import time

from mlx_lm_kvpersist._startup import serve
from mlx_lm_kvpersist.request import memory

raised_until_s = 0.0


def raise_it(*received):
    global raised_until_s
    raised_until_s = time.monotonic() + 10


signal.signal(signal.SIGUSR2, raise_it)
memory.pressure_level = lambda: 4 if time.monotonic() < raised_until_s else 1
serve(sys.argv[1:])
"""
"""A server that reports critical memory pressure for ten seconds after SIGUSR2."""
PARTS = ("caches", "restored", "pool", "records")


class Talks:
    """Sessions with known turns, and the replies of a server with enough memory."""

    def __init__(self, folder: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(CONFIGS, family, {**CONFIGS[family], **LARGE})
        self.model = make_zoo_model(folder / family, family)
        self._bias = {"logit_bias": whole_characters(self.model)}
        model, _ = load(str(self.model))
        spec = probe_model(model, PrecisionChoice(16, 16))
        self.sequence_memory = SequenceMemory.of(spec, None)
        self.block_bytes = 256 * spec.bytes_per_token + spec.bytes_per_checkpoint
        self.replies: dict[tuple[int, int], str] = {}

    def budget(self, n_fit: float) -> int:
        """Return a budget that `n_fit` of the first prompts fill."""
        row = self.sequence_memory.caches_bytes((), [N_TOKENS + LONG_REPLY // 4], MORE + GROWTH)
        # An eighth is for the pool, an eighth for chunks, and 32 MiB for SQLite and texts.
        return int(max(128 * MIB, (n_fit * row + 32 * MIB) * 8 / 6))

    def messages(self, number: int, turn: int) -> list[Message]:
        text = synthetic_text(int(N_TOKENS * CHARS_PER_TOKEN), seed=number)
        messages: list[Message] = [{"role": "user", "content": f"{number}: {text}"}]
        for before in range(turn):
            messages.append({"role": "assistant", "content": self.replies[number, before]})
            question = synthetic_text(60, seed=before)
            messages.append({"role": "user", "content": f"{before}? {question}"})
        return messages

    def ask(self, server: ServerProcess, number: int, turn: int) -> str:
        n_tokens = LONG_REPLY if number < N_FIT and not turn else REPLY
        asked: dict[str, Any] = {"max_tokens": n_tokens, "temperature": 0.0, **self._bias}
        messages = self.messages(number, turn)
        return server.chat(messages, session=f"s{number}", stream=True, **asked).text

    def compute(self, server: ServerProcess, n_turns: int) -> None:
        """Record the replies of the first turns of each session."""
        for turn in range(n_turns):
            for number in range(N_SESSIONS):
                self.replies[number, turn] = self.ask(server, number, turn)


class Samples:
    """Samples the account and the process's memory 20 times a second."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self.most_bytes = self.most_active = self.most_resident = self.most_waiting = 0.0
        self.n_samples = 0
        self.presses = False
        """Whether to simulate memory pressure as soon as requests wait for memory."""
        self.total = self._parts()["total"]
        self.before = resident_bytes(server)

    def _parts(self) -> dict[str, float]:
        text = self._server.request("GET", "/metrics")[2].decode()
        parts = r'^kvpersist_memory_(?:bytes\{part="(\w+)"\}|(waiting)) (\S+)'
        matches = re.findall(parts, text, re.MULTILINE)
        return {part or other: float(value) for part, other, value in matches}

    @contextmanager
    def taken(self) -> Iterator[None]:
        over = threading.Event()
        thread = threading.Thread(target=self._take, args=(over,))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _take(self, over: threading.Event) -> None:
        while not over.wait(0.05):
            sample = self._parts()
            self.most_bytes = max(self.most_bytes, sum(sample[part] for part in PARTS))
            self.most_active = max(self.most_active, sample["active"] - sample["weights"])
            self.most_resident = max(self.most_resident, resident_bytes(self._server))
            self.most_waiting = max(self.most_waiting, sample["waiting"])
            self.n_samples += 1
            if self.presses and sample["waiting"] >= 3:
                self.presses = False
                os.kill(self._server.pid, signal.SIGUSR2)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_memory_in_use_stays_within_the_budget(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Eight clients, replies that are parked if memory is short, and two restarts."""
    talks, n_turns = Talks(tmp_path, family, monkeypatch), max(3, N_TURNS // N_SESSIONS)
    began_s = time.monotonic()
    plain = start_server.with_plugin(talks.model, *FULL_PRECISION)
    talks.compute(plain, n_turns)
    plain.stop()
    print(f"\n{family}: alone {time.monotonic() - began_s:.0f} s")
    more = "--kvpersist-memory", str(talks.budget(N_FIT + 0.3))
    launcher = tmp_path / "pressed.py"
    launcher.write_text(LAUNCHER, encoding="utf-8")
    server = start_server.with_plugin(
        talks.model, *FULL_PRECISION, *more, env=MALLOC_ENV, launcher=(str(launcher),)
    )
    log = Path(server.log_path)
    n_parked = 0
    middle = n_turns // 2 + 1
    for n_start, turns in enumerate([range(1), range(1, middle), range(middle, n_turns)]):
        if n_start:
            server.restart()
        samples = Samples(server)
        samples.presses = not n_start

        def ask_turns(number: int, turns: range = turns) -> list[str]:
            return [talks.ask(server, number, turn) for turn in turns]

        began_s = time.monotonic()
        with samples.taken(), ThreadPoolExecutor(N_CLIENTS) as clients:
            replies = list(clients.map(ask_turns, range(N_SESSIONS)))
        wait_for_writer(server)
        n_parked = log.read_text(encoding="utf-8").count("waits for memory")
        numbers = {name: value for name, value in vars(samples).items() if name[0] != "_"}
        print(f"{time.monotonic() - began_s:.0f} s", turns, numbers, n_parked, talks.block_bytes)
        assert replies == [[talks.replies[i, turn] for turn in turns] for i in range(N_SESSIONS)]
        assert samples.n_samples > 5
        assert samples.most_bytes <= samples.total + talks.block_bytes
        assert samples.most_active <= samples.total + talks.block_bytes
        assert samples.most_resident - samples.before <= 1.1 * samples.total + LEFT_BYTES
        assert n_start or samples.most_waiting >= N_CLIENTS - N_FIT - 1
    # The windows of gemma3_text are full before its replies are long.
    assert n_parked or family == "gemma3_text"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_prompt_larger_than_the_budget_and_small_prompts_are_served(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The large prompt runs alone; twenty smaller prompts run before and after it."""
    monkeypatch.setattr(f"{__name__}.N_SESSIONS", 20)
    monkeypatch.setattr(f"{__name__}.N_FIT", 0)
    monkeypatch.setattr(f"{__name__}.N_TOKENS", 150)
    talks = Talks(tmp_path, "llama", monkeypatch)
    long: list[Message] = [{"role": "user", "content": synthetic_text(7_000, seed=99)}]

    def ask(server: ServerProcess, number: int) -> str:
        if number < 20:
            return talks.ask(server, number, 0)
        return server.chat(long, max_tokens=REPLY, temperature=0.0).text

    plain = start_server.with_plugin(talks.model, *FULL_PRECISION)
    expected = [ask(plain, number) for number in range(21)]
    plain.stop()
    more = "--kvpersist-memory", "128M"
    server = start_server.with_plugin(talks.model, *FULL_PRECISION, *more)
    with ThreadPoolExecutor(21) as clients:
        order = [*range(10), 20, *range(10, 20)]
        replies = dict(zip(order, clients.map(partial(ask, server), order), strict=True))
    assert [replies[number] for number in range(21)] == expected
