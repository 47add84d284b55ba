"""`python -m tools.streams [CHECKOUT ...]`: what short streams cost beside the stock server.

A tiny model answers short streamed chats of 1, 4 and 8 clients. Each line has the wall time and the
CPU time of the server's process: of the stock server, and of the plugin of each checkout. All
servers run at the same time and take turns, so that other load meets all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.server_process import HOST, ServerProcess
from tests.support.synthetic.model import make_tiny_model

CLIENTS = (1, 4, 8)
ROOT = Path(__file__).parents[1]
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Return the seconds of CPU that a process has used. Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def stream(port: int, numbers: Sequence[int], n_tokens: int) -> None:
    """Read streamed chats on one connection each, until their ends."""
    for number in numbers:
        content = f"Stream {number}: say a few words about the weather."
        body = {"messages": [{"role": "user", "content": content}], "stream": True}
        body |= {"max_tokens": n_tokens, "temperature": 0}
        connection = HTTPConnection(HOST, port)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {})
        if not connection.getresponse().read().rstrip().endswith(b"[DONE]"):
            raise RuntimeError("a stream has no end")
        connection.close()


def measure(
    server: ServerProcess, n_clients: int, first: int, n: int, n_tokens: int
) -> list[float]:
    """Return the wall time and the CPU time of `n` streams, in seconds."""
    numbers = range(first, first + n)
    threads = [
        threading.Thread(target=stream, args=(server.port, numbers[client::n_clients], n_tokens))
        for client in range(n_clients)
    ]
    started, used = time.perf_counter(), cpu_s(server.pid)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [time.perf_counter() - started, cpu_s(server.pid) - used]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path, default=[ROOT])
    parser.add_argument("--streams", type=int, default=200, help="for each number of clients")
    parser.add_argument("--tokens", type=int, default=16, help="of each reply")
    parser.add_argument("--rounds", type=int, default=4, help="in which the streams are sent")
    args = parser.parse_args()
    with TemporaryDirectory() as folder, ExitStack() as stack:
        model = make_tiny_model(Path(folder) / "model")
        servers = {"stock": stack.enter_context(ServerProcess(model))}
        for checkout in args.checkouts:
            store = ("--plugin", "kvpersist", "--kvpersist-dir", f"{folder}/{len(servers)}")
            env = {"PYTHONPATH": str(checkout.resolve())}
            server = ServerProcess(model, *store, env=env)
            servers[str(checkout.resolve())] = stack.enter_context(server)
        first, n = 0, args.streams // args.rounds
        for server in servers.values():
            measure(server, 4, -20, 20, args.tokens)  # threads and kernels of the first streams
        for n_clients in CLIENTS:
            found: dict[str, list[list[float]]] = {name: [] for name in servers}
            for _ in range(args.rounds):
                for name, server in servers.items():
                    found[name].append(measure(server, n_clients, first, n, args.tokens))
                first += n
            stock = found["stock"]
            for name, rows in found.items():
                wall, used = (sum(column) for column in zip(*rows, strict=True))
                ratios = [row[0] / other[0] for row, other in zip(rows, stock, strict=True)]
                ratio = used / sum(other[1] for other in stock)
                print(
                    f"{n_clients} clients, {name}: wall {wall:.2f} s "
                    f"({statistics.median(ratios):.2f} of stock), CPU {used:.2f} s ({ratio:.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
