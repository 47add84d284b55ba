"""How long a start takes: from the start of the process to the first token of a short reply.

    python -m benchmarks.start [--model …] [--repeats 7] [--requests 200]

Stock, ours with an empty store (`first`), and ours with a store of an earlier start (`later`) take
turns. A client tries to connect from the first moment on, sends a chat as soon as the port is open,
and the process is killed at the first token of the reply. So its CPU seconds are those of the
start. Each start asks something else: nothing is restored but the beginning that all prompts share.

A second table says where the seconds go: the same servers in a launcher that times a few functions
(`benchmarks.traced_start`). A third one is of short requests that begin with the port of a first
start, one every `--every` seconds, beside the same on stock; both must be able to keep up.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from mlx_lm_kvpersist.api.admin import SPEC_PATH
from tests.support.server_process import HOST, free_port

from .report import Result
from .runs import Run, median, parser, percentile, ratio, run_of
from .servers import rotated
from .traced_start import TRACE_FILE

STOCK, FIRST, LATER = "stock", "ours, first", "ours, later"
SIDES = (STOCK, FIRST, LATER)
_KNOWN_S = 600.0
"""How long a server may take to find out all of a model."""


@dataclass
class Server:
    """A server that was just started as its user starts it."""

    model: Path
    side: str
    store: Path
    trace: Path | None = None

    def __enter__(self) -> Server:
        self.port = free_port()
        plugin = ["--plugin", "kvpersist", "--kvpersist-dir", str(self.store)]
        launcher = ["mlx_lm", "server"] if self.trace is None else ["benchmarks.traced_start"]
        # Installed packages have their bytecode.
        unset = {"PYTHONDONTWRITEBYTECODE"}
        env = {name: value for name, value in os.environ.items() if name not in unset}
        env |= {"HF_HUB_OFFLINE": "1", TRACE_FILE: str(self.trace)}
        self.started_s = time.perf_counter()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", *launcher, "--model", str(self.model)),
                *("--host", HOST, "--port", str(self.port), "--log-level", "ERROR"),
                *(plugin if self.side != STOCK else ()),
            ],
            env=env,
            stderr=subprocess.DEVNULL,
        )
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.kill_s()

    def kill_s(self) -> float:
        """Kill it; return the CPU seconds that it took."""
        if self.process.returncode is None:
            self.process.kill()
            _, self.process.returncode, used = os.wait4(self.process.pid, 0)
            return used.ru_utime + used.ru_stime
        return 0.0

    def wait_for_port(self) -> float:
        """Return the seconds from the start until somebody listens."""
        while self.process.poll() is None:
            try:
                connection = HTTPConnection(HOST, self.port)
                connection.connect()
                connection.close()
                return time.perf_counter() - self.started_s
            except OSError:
                time.sleep(0.002)
        raise RuntimeError(f"the server of {self.side} ended")

    def first_token(self, question: str, max_tokens: int = 8) -> float:
        """Ask; return the seconds until the first event of the reply's text."""
        asked_s = time.perf_counter()
        message = {"role": "user", "content": question}
        body = {"messages": [message], "max_tokens": max_tokens, "temperature": 0, "stream": True}
        connection = HTTPConnection(HOST, self.port, timeout=_KNOWN_S)
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        first_s = 0.0
        for line in connection.getresponse():
            if not first_s and _has_text(line):
                first_s = time.perf_counter() - asked_s
                if max_tokens > 1:
                    break
        connection.close()
        return first_s

    def wait_until_known(self) -> None:
        """Return when the plugin has found out all of the model."""
        deadline = time.monotonic() + _KNOWN_S
        while time.monotonic() < deadline:
            connection = HTTPConnection(HOST, self.port, timeout=_KNOWN_S)
            try:
                connection.request("GET", SPEC_PATH)
                if "examining" in (said := json.load(connection.getresponse())):
                    if not said["examining"]:
                        return
                time.sleep(0.1)
            except (OSError, HTTPException, ValueError):
                time.sleep(0.1)
        raise TimeoutError("the model is not known")


def _has_text(line: bytes) -> bool:
    if not line.startswith(b"data: {"):
        return False
    choices = json.loads(line[6:])["choices"]
    return any(choices and choices[0]["delta"].get(name) for name in ("content", "reasoning"))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument("--requests", type=int, default=200)
    options.add_argument("--every", type=float, default=0.1)
    args = options.parse_args()
    run = run_of(args)
    with stores() as folder:
        measure(run, folder, args.repeats).show()
        measure_stages(run, folder).show()
        if args.requests:
            measure_requests(run, folder, args.requests, args.every).show()


@contextmanager
def stores() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvpersist-bench-") as folder:
        yield Path(folder)


def measure(run: Run, folder: Path, n_repeats: int) -> Result:
    result = run.result(
        "start",
        "Seconds from the start of the process to an open port and to a reply's first token.",
        {"repeats": n_repeats, "load of the machine before": os.getloadavg()[0]},
    )
    _prepare(run, folder)
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for repeat in range(n_repeats):
        for side in rotated(SIDES, repeat):
            with _server(run, folder, side) as server:
                port_s = server.wait_for_port()
                server.first_token(f"{repeat}{side}: what is the capital of France?")
                first_s = time.perf_counter() - server.started_s
                found[side].append((port_s, first_s, server.kill_s()))
    for side in SIDES:
        columns = list(zip(*found[side], strict=True))
        stocks = list(zip(*found[STOCK], strict=True))
        result.add(
            {
                "side": side,
                "port s": median(columns[0]),
                "first token s": median(columns[1]),
                "over stock": ratio(columns[1], stocks[1]),
                "CPU s": median(columns[2]),
                "CPU over stock": ratio(columns[2], stocks[2]),
            }
        )
    return result


def measure_stages(run: Run, folder: Path) -> Result:
    """Say where the seconds of one start of each side go."""
    result = run.result(
        "start-stages",
        "Milliseconds of wall time of one start, and CPU milliseconds.",
        {},
    )
    seen: dict[str, dict[str, tuple[float, float]]] = {}
    for side in SIDES:
        trace = folder / "trace.json"
        trace.unlink(missing_ok=True)
        with _server(run, folder, side, trace) as server:
            server.wait_for_port()
            server.first_token(f"{side}: what is the capital of Spain?", 1)
            whole_s = time.perf_counter() - server.started_s
            while not trace.exists():
                time.sleep(0.01)
            stages = json.loads(trace.read_text(encoding="utf-8"))
        rest = whole_s - sum(wall_s for wall_s, _ in stages.values())
        seen[side] = {**stages, "the rest": (rest, 0.0), "all": (whole_s, 0.0)}
    for stage in dict.fromkeys(stage for stages in seen.values() for stage in stages):
        row: dict[str, Any] = {"stage": stage}
        for side in SIDES:
            wall_s, cpu_s = seen[side].get(stage, (None, None))
            row[f"{side} ms"] = None if wall_s is None else wall_s * 1e3
            row[f"{side} CPU ms"] = cpu_s * 1e3 if cpu_s else None
        result.add(row)
    return result


def measure_requests(run: Run, folder: Path, n_requests: int, every_s: float) -> Result:
    """Send short requests from the first moment on, to stock and to a first start of ours."""
    result = run.result(
        "start-requests",
        "Seconds that short requests wait for their first token, from the opening of the port on.",
        {"requests": n_requests, "every s": every_s},
    )
    waits: dict[str, Sequence[float]] = {}
    for side in (STOCK, FIRST):
        with _server(run, folder, side) as server, ThreadPoolExecutor(n_requests) as pool:
            server.wait_for_port()
            asked = []
            for number in range(n_requests):
                asked.append(pool.submit(server.first_token, f"{number} and {number}?", 1))
                time.sleep(every_s)
            waits[side] = [one.result() for one in asked]
    more = [ours - stock for ours, stock in zip(waits[FIRST], waits[STOCK], strict=True)]
    for side, its in waits.items():
        result.add(
            {
                "side": side,
                "median s": median(its),
                "p99 s": percentile(its, 0.99),
                "longest s": max(its),
                "most above stock's s": max(more) if side == FIRST else None,
            }
        )
    return result


def _server(run: Run, folder: Path, side: str, trace: Path | None = None) -> Server:
    store = folder / ("known" if side == LATER else "new")
    if side == FIRST:
        shutil.rmtree(store, ignore_errors=True)
    return Server(run.model.path, side, store, trace)


def _prepare(run: Run, folder: Path) -> None:
    """Start once and let all be found out of the model, for the later starts."""
    with _server(run, folder, LATER) as server:
        server.wait_for_port()
        server.first_token("Hello?", 1)
        server.wait_until_known()
        time.sleep(1.0)  # what was found is written
    with _server(run, folder, STOCK) as server:
        server.wait_for_port()
        server.first_token("Hello?", 1)


if __name__ == "__main__":
    main()
