"""Wall time and CPU time of the server for short streamed chats of 1, 4 and 8 clients."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.support.synthetic import Message

from .checks import SERVED
from .runs import Run
from .servers import BenchmarkServer, rotated

QUESTION = "short streams"
CLIENTS = (1, 4, 8)
MAX_TOKENS = 16


def measure(run: Run, n_streams: int, n_repeats: int) -> None:
    """Measure `n_streams` streams for each number of clients."""
    n = n_streams // n_repeats
    first = 0
    sides = run.sides()
    with run.fleet(sides) as fleet:
        for side in sides:  # starts threads and compiles kernels
            _stream(fleet[side], 4, range(-20, 0))
        for n_clients in CLIENTS:
            for repeat in range(n_repeats):
                for side in rotated(sides, repeat):
                    wall_s, cpu_s = _stream(fleet[side], n_clients, range(first, first + n))
                    name = "1 client" if n_clients == 1 else f"{n_clients} clients"
                    run.report.add(QUESTION, f"{name}, wall time", side, "s", wall_s)
                    if cpu_s is not None:
                        run.report.add(QUESTION, f"{name}, CPU time", side, "s", cpu_s)
                first += n
    run.report.note(
        QUESTION,
        f"A sample has {n} streams of {MAX_TOKENS} tokens; the model is {run.model.name}. CPU time "
        "includes the plugin's writes after the last reply.",
    )


def _stream(
    server: BenchmarkServer, n_clients: int, numbers: Sequence[int]
) -> tuple[float, float | None]:
    """Return the wall time and the server's CPU time, in seconds."""

    def client(index: int) -> None:
        for number in numbers[index::n_clients]:
            content = f"Stream {number}: say a few words about the weather."
            message: Message = {"role": "user", "content": content}
            server.ask([message], MAX_TOKENS, SERVED)

    started_s, before_s = time.perf_counter(), server.cpu_s()
    with ThreadPoolExecutor(n_clients) as pool:
        list(pool.map(client, range(n_clients)))
    wall_s = time.perf_counter() - started_s
    server.settle()  # the CPU time includes the writes after the last reply
    after_s = server.cpu_s()
    return wall_s, None if before_s is None or after_s is None else after_s - before_s
