"""A server's start: from the start of the process to the first token, and the first conversation.

    python -m benchmarks.start [--scenarios start stages conversation] [--model …] [--repeats 7]

A real model on a CPU wants `python -m tests.support.openblas` before the command. A GPU takes
`--scenarios conversation --model synthetic:llama-3.1-8b`.

Stock and ours take turns. Ours has the default options, and an empty store at each start.

`start`: a client tries to connect from the first moment on and sends a chat as soon as the port is
open. The process is killed at the reply's first token, so its CPU seconds are the start's.
`stages`: the seconds of each part of a start (`benchmarks.traced_start`).
`conversation`: an agent sends its turns as soon as /health answers 200. Another client asks for
four tokens every two seconds. The run fails if ours does not keep the model by default.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from mlx_lm_kvpersist.api.admin import SPEC_PATH
from mlx_lm_kvpersist.config import DEFAULT_BITS
from tests.support import Message, ServerProcess, synthetic_text
from tests.support.server_process import HOST, free_port

from .measured_server import process_cpu_s
from .report import Result
from .runs import Run, median, parser, ratio, run_of
from .servers import check_kept, rotated
from .traced_start import TRACE_FILE

SIDES = STOCK, OURS = "stock", "ours"
SCENARIOS = ("start", "stages", "conversation")
_TIMEOUT_S = 600.0
_N_TURNS, _SYSTEM_TOKENS = 6, 1500
_SHORT_EVERY_S = 2.0
_COLUMNS = "prompt", "reused", "first token s", "CPU s"


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
        env = {name: os.environ[name] for name in os.environ if name != "PYTHONDONTWRITEBYTECODE"}
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

    def wait_for_first_token(self, question: str, max_tokens: int = 8) -> None:
        """Ask; return at the first event of the reply's text."""
        message = {"role": "user", "content": question}
        body = {"messages": [message], "max_tokens": max_tokens, "temperature": 0, "stream": True}
        connection = HTTPConnection(HOST, self.port, timeout=_TIMEOUT_S)
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        for line in connection.getresponse():
            choices = json.loads(line[6:])["choices"] if line.startswith(b"data: {") else []
            if choices and choices[0]["delta"].get("content"):
                break
        connection.close()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=SCENARIOS)
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument("--conversations", type=int, default=2)
    options.add_argument("--seconds", type=float, default=60.0, help="of short requests")
    args = options.parse_args()
    run = run_of(args)
    with tempfile.TemporaryDirectory(prefix="kvpersist-bench-") as name:
        folder = Path(name)
        if "start" in args.scenarios:
            measure(run, folder, args.repeats).show()
        if "stages" in args.scenarios:
            measure_stages(run, folder).show()
        if "conversation" in args.scenarios:
            measure_conversation(run, folder, args.conversations, args.seconds).show()


def measure(run: Run, folder: Path, n_repeats: int) -> Result:
    result = run.result(
        "start",
        "Seconds from the start of the process to an open port and to a reply's first token.",
        {"repeats": n_repeats, "load of the machine before": os.getloadavg()[0]},
    )
    for side in SIDES:  # the files of models and packages are in the page cache from now on
        with _server(run, folder, side) as server:
            server.wait_for_port()
            server.wait_for_first_token("Hello?", 1)
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for repeat in range(n_repeats):
        for side in rotated(SIDES, repeat):
            with _server(run, folder, side) as server:
                port_s = server.wait_for_port()
                server.wait_for_first_token(f"{repeat}{side}: what is the capital of France?")
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
            server.wait_for_first_token(f"{side}: what is the capital of Spain?", 1)
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


def measure_conversation(run: Run, folder: Path, n_repeats: int, short_s: float) -> Result:
    """Have an agent's first turns answered by stock and by ours, which take turns.

    Raises SystemExit if ours does not keep the model in the default precision.
    """
    result = run.result(
        "start-conversation",
        "An agent's turns from the first answer of /health on: tokens reused, seconds to the first "
        "token, CPU seconds of the server. Beside it, the longest wait of short requests.",
        {"repeats": n_repeats, "short requests for s": short_s},
    )
    system = run.prompts.of_length(_SYSTEM_TOKENS, seed=0)[0]["content"]
    turns: dict[str, list[list[dict[str, float]]]] = {side: [] for side in SIDES}
    waits: dict[str, list[float]] = {side: [] for side in SIDES}
    for repeat in range(n_repeats):
        for side in rotated(SIDES, repeat):
            plugin = "--plugin", "kvpersist", "--kvpersist-dir", f"{folder}/conversation-{repeat}"
            options = plugin if side == OURS else ()
            with ServerProcess(run.model.path, *options, request_timeout_s=_TIMEOUT_S) as server:
                with ThreadPoolExecutor(1) as pool:
                    longest = pool.submit(_longest_wait, server, time.monotonic() + short_s)
                    turns[side].append(_converse(server, system))
                waits[side].append(longest.result())
                if side == OURS:
                    check_kept(json.loads(server.request("GET", SPEC_PATH)[2]), DEFAULT_BITS)
    for number in range(_N_TURNS):
        row: dict[str, Any] = {"turn": number + 1}
        for column in _COLUMNS:
            for side, its in turns.items():
                row[f"{side} {column}"] = median([its_turns[number][column] for its_turns in its])
        firsts = [[its[number]["first token s"] for its in turns[side]] for side in (OURS, STOCK)]
        result.add({**row, "first token, ours / stock": ratio(*firsts)})
    longest_s = {f"{side} first token s": max(its) for side, its in waits.items()}
    ratios = {"first token, ours / stock": ratio(waits[OURS], waits[STOCK])}
    result.add({"turn": "longest wait of a short request", **longest_s, **ratios})
    return result


def _converse(server: ServerProcess, system: str) -> list[dict[str, float]]:
    """Have an agent's turns answered: a system prompt, and a history that grows."""
    messages: list[Message] = [{"role": "system", "content": system}]
    turns = []
    for number in range(_N_TURNS):
        question = f"Step {number}: {synthetic_text(400, seed=number)}"
        messages.append({"role": "user", "content": question})
        before_s = process_cpu_s(server.pid)
        reply = server.chat(messages, "agent", stream=True, max_tokens=32, temperature=0.0)
        cpu_s = process_cpu_s(server.pid) - before_s
        seen = reply.prompt_tokens, reply.cached_tokens, reply.ttft_s, cpu_s
        turns.append(dict(zip(_COLUMNS, seen, strict=True)))
        messages.append({"role": "assistant", "content": reply.text})
    return turns


def _longest_wait(server: ServerProcess, until_s: float) -> float:
    """Ask for four tokens every two seconds; return the longest wait for the first of them."""
    longest_s, number = 0.0, 0
    while (asked_s := time.monotonic()) < until_s:
        question: Message = {"role": "user", "content": f"{number} and {number}?"}
        reply = server.chat([question], stream=True, max_tokens=4, temperature=0.0)
        longest_s, number = max(longest_s, reply.ttft_s), number + 1
        time.sleep(max(0.0, asked_s + _SHORT_EVERY_S - time.monotonic()))
    return longest_s


def _server(run: Run, folder: Path, side: str, trace: Path | None = None) -> Server:
    store = folder / "store"
    shutil.rmtree(store, ignore_errors=True)
    return Server(run.model.path, side, store, trace)


if __name__ == "__main__":
    main()
