"""Many clients at once, some of which disconnect: each reply is as for a single client."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import (
    Message,
    ServerProcess,
    StartServer,
    make_zoo_model,
    synthetic_text,
)
from tests.support.waiting import wait_until

from .stored import wait_for_writer

SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]
CROWDS = [
    pytest.param("llama", 10, 12, id="some"),
    pytest.param("llama", 300, 50, id="many", marks=SLOW),
    *(
        pytest.param(family, 120, 12, id=family, marks=SLOW)
        for family in ("gemma3_text", "mamba2", "falcon_h1")
    ),
]
"""The model, requests for each client, and the number of clients. The models have caches of all
tokens, windows, states, and two kinds in one layer."""

LEFT_BYTES = 256 << 20
"""The memory that may stay in use after a crowd: MLX keeps freed buffers."""

LAUNCHER = """
import os
import sys
import threading

from mlx_lm_kvpersist._startup import serve
from mlx_lm_kvpersist.plugin import KVPersistPlugin

TASKS = "/proc/self/task"
stats = KVPersistPlugin._stats


def counted(plugin):
    n_threads = len(os.listdir(TASKS)) if os.path.exists(TASKS) else threading.active_count()
    return {**stats(plugin), "n_threads": n_threads, "n_files": len(os.listdir("/dev/fd"))}


KVPersistPlugin._stats = counted
serve(sys.argv[1:])
"""
"""A server whose statistics have its numbers of threads and descriptors. On a Mac, threads that
Python did not start are not counted."""


class Crowd:
    """Clients that ask a few questions in random order, as streams or not, and may disconnect."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.prompts: list[list[Message]] = [
            [
                {"role": "system", "content": synthetic_text(n_system, seed=n_system)},
                {"role": "user", "content": f"Question {n}. {synthetic_text(n_chars, seed=n)}"},
            ]
            for n, (n_system, n_chars) in enumerate(
                (n_system, n_chars) for n_system in (40, 1500) for n_chars in (5, 300, 2500)
            )
        ]
        self.alone = [self.ask(prompt) for prompt in self.prompts]
        self.wrong: list[str] = []
        self.n_replies = self.n_left = 0
        self._lock = threading.Lock()

    def ask(self, messages: list[Message], stream: bool = False) -> str:
        return self.server.chat(messages, stream=stream, max_tokens=8, temperature=0.0).text

    def run(self, n_clients: int, n_times: int) -> None:
        threads = [
            threading.Thread(target=self._client, args=(seed, n_times)) for seed in range(n_clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, seed: int, n_times: int) -> None:
        rng = random.Random(seed)
        for _ in range(n_times):
            number = rng.randrange(len(self.prompts))
            if rng.random() < 0.3:
                self._leave(self.prompts[number], rng.random() < 0.5, rng.choice([0.0, 0.05, 0.4]))
                with self._lock:
                    self.n_left += 1
                continue
            try:
                text = self.ask(self.prompts[number], stream=rng.random() < 0.5)
            except Exception as error:
                text = repr(error)
            with self._lock:
                self.n_replies += 1
                if text != self.alone[number]:
                    self.wrong.append(f"{number}: {text!r}, expected {self.alone[number]!r}")

    def _leave(self, messages: list[Message], stream: bool, after_s: float) -> None:
        body: dict[str, Any] = {"messages": messages, "max_tokens": 200, "stream": stream}
        payload = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: {len(payload)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.server.port or 0), timeout=60) as client:
            client.sendall(head.encode() + payload)
            time.sleep(after_s)


def resident_bytes(server: ServerProcess) -> int:
    """Return how much memory the server's process has; 0 on a Mac."""
    status = Path("/proc") / str(server.pid) / "statm"
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


def n_threads_and_files(server: ServerProcess) -> tuple[int, int]:
    """Return how many threads and descriptors the server's process has (see LAUNCHER)."""
    counts = json.loads(server.request("GET", "/v1/kvpersist/stats")[2])
    return counts["n_threads"], counts["n_files"]


@pytest.mark.parametrize(("family", "n_times", "n_clients"), CROWDS)
def test_concurrent_clients_get_the_replies_of_single_clients(
    family: str,
    n_times: int,
    n_clients: int,
    tiny_model: Path,
    tmp_path: Path,
    start_server: StartServer,
) -> None:
    model = tiny_model
    if family != "llama":
        model = make_zoo_model(tmp_path / "model", family)
        config = json.loads((model / "config.json").read_text())
        config["max_position_embeddings"] = 1 << 16  # the prompts are longer than the default
        (model / "config.json").write_text(json.dumps(config))
    (launcher := tmp_path / "counted.py").write_text(LAUNCHER, encoding="utf-8")
    server = start_server.with_plugin(model, "--kvpersist-ram", "64M", launcher=(str(launcher),))
    crowd = Crowd(server)
    crowd.run(n_clients, min(n_times // 4, 20))  # threads and buffers that a crowd needs now exist
    wait_for_writer(server)
    before, bytes_before = n_threads_and_files(server), resident_bytes(server)
    crowd.run(n_clients, n_times)
    assert not crowd.wrong, (len(crowd.wrong), crowd.n_replies, crowd.wrong[:3])
    assert crowd.n_replies >= n_clients and crowd.n_left >= n_clients / 4
    wait_for_writer(server)
    # Worker threads and index connections are made at first use, and stay.
    wait_until(
        lambda: all(
            now <= was + 12 for now, was in zip(n_threads_and_files(server), before, strict=True)
        ),
        f"threads and descriptors as before: {before}",
    )
    # On a Mac, both sizes are 0, and memory is not checked.
    assert resident_bytes(server) <= bytes_before + LEFT_BYTES
    assert crowd.ask(crowd.prompts[0]) == crowd.alone[0]
