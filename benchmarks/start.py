"""The time from a server's start to its first token, and the time to a second turn's first token.

Each sample starts a process, and its time begins with the command. `first`: the store is empty, and
on CUDA no kernel is compiled. `later`: a conversation has left a store and compiled kernels. The
first conversation has a system prompt, and two turns as soon as the server is healthy. Before the
first sample, each side serves such a conversation once: reading files for the first time, or other
work that a machine does once, would otherwise count for the side that comes first.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

from tests.support.synthetic import Message, synthetic_text

from .checks import SERVED, new, reused
from .runs import Run
from .servers import BenchmarkServer, rotated

QUESTION = "start"
FIRST, LATER = "first start to the first token", "later start to the first token"
SECOND_TURN = "second turn of the first conversation"
_SYSTEM_TOKENS, _TURN_CHARS, _MAX_TOKENS = 1500, 400, 32


def measure(run: Run, n_repeats: int) -> None:
    sides = run.sides()
    with tempfile.TemporaryDirectory(prefix="kvpersist-bench-") as name:
        for side in sides:  # reads the files of the model and the packages into the page cache
            _second_turn(run, side, Path(name) / f"{side}-warm", keeps_kernels=False)
        for repeat in range(n_repeats):
            for side in rotated(sides, repeat):
                folder = Path(name) / f"{side}-{repeat}"
                question = f"{repeat}: what is the capital of France?"
                run.report.add(QUESTION, FIRST, side, "s", _start(run, side, folder, question))
                shutil.rmtree(folder)
                run.report.add(QUESTION, SECOND_TURN, side, "s", _second_turn(run, side, folder))
                run.report.add(QUESTION, LATER, side, "s", _start(run, side, folder, question))
    run.report.note(
        QUESTION,
        f"The conversation has a system prompt of {_SYSTEM_TOKENS:,} tokens and begins as soon as "
        "/health answers.",
    )


def _server(run: Run, side: str, folder: Path, *, keeps_kernels: bool = True) -> BenchmarkServer:
    """keeps_kernels: whether compiled kernels are in `folder`; otherwise all servers share them."""
    folder.mkdir(exist_ok=True)
    # MLX keeps the compiled kernels of CUDA in this folder, or in a folder that all servers share.
    kernels = {"MLX_PTX_CACHE_DIR": str(folder / "kernels")} if keeps_kernels else None
    return BenchmarkServer(run.model.path, run.side(side), folder, kernels)


def _start(run: Run, side: str, folder: Path, question: str) -> float:
    """Return the seconds from the command to the first token."""
    message: Message = {"role": "user", "content": question}
    started_s = time.perf_counter()
    with _server(run, side, folder) as server:
        asked_s = time.perf_counter()
        reply = server.ask([message], 2, SERVED)
        seconds = asked_s - started_s + reply.ttft_s
        server.check_kept()
        server.settle()
    return seconds


def _second_turn(run: Run, side: str, folder: Path, *, keeps_kernels: bool = True) -> float:
    system = run.prompts.of_length(_SYSTEM_TOKENS, seed=0)[0]["content"]
    messages: list[Message] = [{"role": "system", "content": system}]
    with _server(run, side, folder, keeps_kernels=keeps_kernels) as server:
        server.check_kept()
        messages.append({"role": "user", "content": synthetic_text(_TURN_CHARS, seed=1)})
        first = server.ask(messages, _MAX_TOKENS, new())
        messages.append({"role": "assistant", "content": first.text})
        messages.append({"role": "user", "content": synthetic_text(_TURN_CHARS, seed=2)})
        second = server.ask(messages, 1, reused(first.prompt_tokens - 32))
        server.settle()
    return second.ttft_s
