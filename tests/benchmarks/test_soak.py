"""The soak keeps a server busy, and reports the server's memory."""

from __future__ import annotations

import json
import mmap
import os
import sys
from pathlib import Path
from statistics import median

import pytest

from benchmarks import soak
from benchmarks.soak import Soak, memory_of
from mlx_lm_kvpersist.cli.demo import make_model
from mlx_lm_kvpersist.cli.servers import StartedServer
from mlx_lm_kvpersist.errors import KVPersistError

GIB = 1 << 30


def test_memory_of_a_process_includes_new_allocations() -> None:
    before = memory_of(os.getpid())
    block = mmap.mmap(-1, 32 << 20)  # memory that was not in use before
    block.write(b"x" * len(block))
    assert memory_of(os.getpid()) - before > len(block) // 2


@pytest.mark.parametrize(
    ("last_bytes", "has_grown"),
    [(GIB, False), (GIB + GIB // 8, False), (GIB + GIB // 4, True), (0, False)],
)
def test_soak_detects_growing_memory(tmp_path: Path, last_bytes: int, has_grown: bool) -> None:
    """Typical samples are compared, so a short peak does not count."""
    trial = Soak("model", tmp_path, ())
    trial.samples = [*[GIB // 2] * 5, *[GIB] * 10, 4 * GIB, *[last_bytes] * 4, 4 * GIB]
    assert trial.grew == has_grown
    trial.samples = trial.samples[-6:]  # too few samples
    assert not trial.grew


class ShortSoak(Soak):
    """Ends as soon as replies were reused and blocks were evicted."""

    def _sample(self, server: StartedServer) -> str:
        line = super()._sample(server)
        n_reused = sum(reply.cached_tokens > 100 for reply in self.replies)
        if len(self.replies) > 6 and self.n_evicted and n_reused and len(self.samples) > 4:
            self._ends_s = 0.0
        return line


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_soak_reports_reuse_evictions_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real server with a tiny model, for a few seconds."""
    monkeypatch.setattr(soak, "_REPLY_TOKENS", (2, 24))
    budgets = ("--kvpersist-ram", "256K", "--kvpersist-disk", "64M", "--kvpersist-min-free", "64M")
    log_path = tmp_path / "samples.json"
    model = str(make_model(tmp_path / "model"))
    with log_path.open("w", encoding="utf-8") as log:
        trial = ShortSoak(model, tmp_path, budgets, 240, log)
        trial.run(120.0, every_s=0.2)
    assert len(trial.replies) > 6 and trial.n_evicted > 0
    assert {reply.cached_tokens > 100 for reply in trial.replies} == {True, False}
    assert all(100 < reply.prompt_tokens < 500 for reply in trial.replies)
    lines = [json.loads(line) for line in log_path.read_text().splitlines()]
    assert len(lines) == len(trial.samples) > 4
    assert 6 < lines[-1]["requests"] <= len(trial.replies)
    assert lines[-1]["evicted"] == trial.n_evicted
    assert [line["memory_bytes"] for line in lines] == trial.samples and min(trial.samples) > 0
    summary = trial.seen()
    assert summary.startswith(f"{len(trial.replies)} requests, ") and "\n" not in summary
    assert f"{trial.n_evicted:,} blocks and checkpoints evicted; " in summary
    assert " in the second and the last quarter of the run" in summary
    assert not trial.grew


def test_a_failed_server_fails_the_soak_with_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(soak: Soak, seconds: float, every_s: float) -> None:
        soak.samples.append(GIB)
        soak.most_bytes = GIB
        raise KVPersistError("the server failed: no answer\n--- mlx_lm.server\nits log")

    monkeypatch.setattr(Soak, "run", failing)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr(sys, "argv", ["soak", "--model", str(tmp_path), "--minutes", "2"])
    assert soak.main() == 1
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    assert line.startswith("soak: failed: the server failed: no answer; 0 requests, ")
    assert "memory was 1.0 GiB at most" in line and "; mlx-lm-kvpersist " in line
    assert line.endswith(f"{tmp_path} (llama, 0 B)")
    assert "its log" in captured.err


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_resource_use_does_not_grow_from_1000_to_2000_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory, open files, threads and arrays, while blocks are evicted from RAM and disk."""
    monkeypatch.setattr(soak, "_REPLY_TOKENS", (2, 24))
    monkeypatch.setattr(soak, "StartedServer", CountedServer)
    (tmp_path / "counted.py").write_text(COUNTED.format(path=str(tmp_path / "arrays")))
    budgets = ("--kvpersist-ram", "4M", "--kvpersist-disk", "32M", "--kvpersist-min-free", "64M")
    samples: list[tuple[int, int, int, int]] = []

    class Turns(Soak):
        def _sample(self, server: StartedServer) -> str:
            if len(self.replies) >= 2000:
                self._ends_s = 0.0
            if len(self.replies) >= 1000:
                process, arrays = Path(f"/proc/{server.pid}"), tmp_path / "arrays"
                n_files, n_threads = (
                    len(os.listdir(process / folder)) for folder in ("fd", "task")
                )
                n_arrays = int(arrays.read_text())
                samples.append((memory_of(server.pid), n_files, n_threads, n_arrays))
            return super()._sample(server)

    trial = Turns(str(make_model(tmp_path / "model")), tmp_path, budgets, 400)
    trial.run(3500.0, every_s=1.0)
    n = len(samples) // 8
    first, last = (
        [median(column) for column in zip(*rows, strict=True)]
        for rows in (samples[:n], samples[-n:])
    )
    print(trial.seen(), first, last)
    assert len(trial.replies) >= 2000 and trial.n_evicted > 2000
    assert last[0] < 1.05 * first[0]
    assert last[1] <= first[1] + 2 and last[2] <= first[2] + 2
    assert last[3] < 1.2 * first[3]


COUNTED = """
import gc, os, sys, threading, time
import mlx.core as mx

def count():
    while True:
        n_arrays = sum(type(one) is mx.array for one in gc.get_objects())
        with open({path!r} + ".new", "w") as file:
            file.write(str(n_arrays))
        os.replace({path!r} + ".new", {path!r})
        time.sleep(1)

threading.Thread(target=count, daemon=True).start()
from mlx_lm_kvpersist._startup import serve

serve(sys.argv[1:])
"""


class CountedServer(StartedServer):
    """Runs `counted.py` (next to the log), which counts MLX's arrays every second."""

    def start(self) -> None:
        options = self._command[self._command.index("--model") :]
        self._command = [sys.executable, str(self._log_path.with_name("counted.py")), *options]
        super().start()
