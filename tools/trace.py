"""`python -m tools.trace`: the functions of the package that a start, a restore and a chat run.

start: a server starts, with the default options, until its model is loaded. restore: a prompt of a
tiny model is stored, dropped from RAM, and asked again. Counted is what runs in `take_request` and
`enter`, from the tokenized prompt to the restored caches, the canary's forward pass included. chat:
a short chat is asked again, without streaming, of a server on a port. Counted is what runs from the
accepted connection to the last byte of the reply.

All threads count, each function once; comprehensions count with the function that holds them.
`--list` names the functions.
"""

from __future__ import annotations

import argparse
import copy
import http.client
import importlib
import json
import os
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import mlx_lm_kvpersist
from mlx_lm_kvpersist.host import manager
from mlx_lm_kvpersist.host.patching.patch import PATCH_SET
from mlx_lm_kvpersist.host.patching.patches import PATCHES
from mlx_lm_kvpersist.host.patching.probes import ARGS
from mlx_lm_kvpersist.plugin import KVPersistPlugin
from tests.support import wait_until
from tests.support.synthetic import make_tiny_model, synthetic_text

PACKAGE = Path(mlx_lm_kvpersist.__file__).parent


class Trace:
    """The functions of the package that run while it is on, by file and name."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()
        self._is_on = False
        # Before the server's threads start: a thread asks for its profiler only then.
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if not self._is_on or event != "call" or code.co_name.startswith("<"):
            return
        if threading.current_thread().name == "clients":  # it looks at sockets now and then
            return
        path = Path(code.co_filename)
        if path.is_relative_to(PACKAGE):
            name = getattr(code, "co_qualname", code.co_name)
            self.functions.add((str(path.relative_to(PACKAGE)), name))

    @contextmanager
    def running(self) -> Iterator[None]:
        self.functions, self._is_on = set(), True
        try:
            yield
        finally:
            self._is_on = False


class Server:
    """The server in this process, with the plugin."""

    def __init__(self, model: Path, store: Path) -> None:
        PATCH_SET.apply(PATCHES)
        module = importlib.import_module("mlx_lm.server")
        self.plugin = KVPersistPlugin()
        parser = argparse.ArgumentParser()
        self.plugin.add_options(parser)
        args = parser.parse_args(["--kvpersist-dir", str(store)], copy.copy(ARGS))
        args.model = str(model)
        plugins = manager.make_manager()
        plugins.register(self.plugin, name="kvpersist")
        manager.set_current(plugins)
        for name, value in {"decode_concurrency": 4, "prompt_concurrency": 4}.items():
            setattr(args, name, value)
        args.prefill_step_size, args.repetition_penalty = 2048, 0.0
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        provider = module.ModelProvider(args)
        arguments = "127.0.0.1", self.port, provider
        threading.Thread(target=module.run, args=arguments, daemon=True).start()
        wait_until(lambda: provider.is_ready, "the model", 120)

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request(method, path, json.dumps(body) if body else None)
        reply = connection.getresponse()
        status, content = reply.status, reply.read()
        connection.close()
        return status, content

    def chat(self, messages: list[dict[str, str]]) -> None:
        self._generate("/v1/chat/completions", messages=messages, max_tokens=4)

    def complete(self, prompt: str) -> None:
        self._generate("/v1/completions", prompt=prompt, max_tokens=1)

    def _generate(self, path: str, **body: Any) -> None:
        """Ask for a short reply."""
        status, content = self.ask("POST", path, {**body, "temperature": 0.0})
        assert status == 200, content

    def settle(self, *, forget: bool) -> None:
        """Wait until all turns are on disk; drop them from RAM if they are to be forgotten."""
        store = self.plugin._store
        assert store is not None
        wait_until(lambda: self.ask("GET", "/v1/kvpersist/stats")[0] == 200, "statistics")
        store.drain()
        if forget:
            store.pool.clear()


def traced(folder: Path) -> dict[str, set[tuple[str, str]]]:
    """Return the functions that a start, a restore from disk and a chat request run."""
    trace, model = Trace(), make_tiny_model(folder / "model")
    with trace.running():
        server = Server(model, folder / "store")
    prompt = synthetic_text(900, seed=1)
    server.complete(prompt)
    server.settle(forget=True)
    stock_take, stock_enter = manager.take_request, manager.Taken.enter
    found: dict[str, set[tuple[str, str]]] = {"start": trace.functions, "restore": set()}

    def counted(function: Any) -> Any:
        def call(*args: Any) -> Any:
            with trace.running():
                answer = function(*args)
            found["restore"] |= trace.functions
            return answer

        return call

    name = "mlx_lm_kvpersist.host.scheduling.waiting"
    waiting: Any = importlib.import_module(name)
    waiting.take_request = counted(stock_take)
    manager.Taken.enter = counted(stock_enter)  # type: ignore[method-assign]
    server.complete(prompt)
    waiting.take_request = stock_take
    manager.Taken.enter = stock_enter  # type: ignore[method-assign]
    messages = [
        {"role": "system", "content": synthetic_text(300, seed=2)},
        {"role": "user", "content": synthetic_text(300, seed=3)},
    ]
    server.chat(messages)
    server.settle(forget=False)
    with trace.running():
        server.chat(messages)
    found["chat"] = trace.functions
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="name the functions of each file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        found = traced(Path(folder))
    for journey, functions in found.items():
        files = sorted({file for file, _ in functions})
        print(f"{journey}: {len(functions)} functions in {len(files)} files")
        folders = Counter(str(Path(file).parent) for file, _ in functions)
        for name, n_functions in sorted(folders.items()):
            n_files = sum(str(Path(file).parent) == name for file in files)
            print(f"  {name + '/':20} {n_functions:4} functions in {n_files:2} files")
        for file in files if args.list else ():
            names = sorted(name for at, name in functions if at == file)
            print(f"  {file}: {', '.join(names)}")
    sys.stdout.flush()
    os._exit(0)  # the server's threads go on


if __name__ == "__main__":
    main()
