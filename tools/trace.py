"""`python -m tools.trace`: the package's functions that run in four journeys of a server.

start    a server with a tiny model starts with the default options, until its model is loaded
save     the prompt and the reply of a request are stored; counts calls of `insert`, and all work of
         the writer's thread
restore  the prompt is removed from RAM, and sent again; counts calls of `take_request` and `enter`,
         from the tokenized prompt to the restored caches, with the canary's forward pass
chat     a short chat is sent again, without streaming; counts all calls from the accepted
         connection to the last byte of the reply

Each function counts once, on any thread; comprehensions are part of the function that contains
them. `--list` names the functions.
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
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import mlx_lm_kvpersist
from mlx_lm_kvpersist.host import manager
from mlx_lm_kvpersist.host.patching.patches import PATCH_SET, PATCHES
from mlx_lm_kvpersist.host.patching.probes import ARGS
from mlx_lm_kvpersist.plugin import KVPersistPlugin
from tests.support import wait_until
from tests.support.synthetic import make_tiny_model, synthetic_text

PACKAGE = Path(mlx_lm_kvpersist.__file__).parent
Functions = set[tuple[str, str]]
"""The file and the name of each function."""


class Trace:
    def __init__(self) -> None:
        self._functions: Functions = set()
        self._counted_threads: set[int] = set()
        self._counts_all = False
        self._names: tuple[str, ...] = ()
        # Set before the server's threads start, because a thread gets its profiler when it starts.
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name.startswith("<"):
            return
        thread = threading.current_thread()
        is_counted = self._counts_all or thread.ident in self._counted_threads
        # The thread "clients" runs at irregular times, so it is not counted.
        if not (is_counted or thread.name.startswith(self._names)) or thread.name == "clients":
            return
        path = Path(code.co_filename)
        if path.is_relative_to(PACKAGE):
            name = getattr(code, "co_qualname", code.co_name)
            self._functions.add((str(path.relative_to(PACKAGE)), name))

    @contextmanager
    def journey(
        self, *entries: tuple[Any, str], threads: tuple[str, ...] = ()
    ) -> Iterator[Functions]:
        """Yield the functions that run until the end of the block.

        entries: pairs of an object and the name of its function; without pairs all calls count.
        threads: prefixes of names; all calls on these threads count.
        """
        self._functions, self._names, self._counts_all = set(), threads, not entries
        with ExitStack() as stack:
            for holder, name in entries:
                counted = self._counted(getattr(holder, name))
                stack.enter_context(mock.patch.object(holder, name, counted))
            yield self._functions
        self._names, self._counts_all = (), False

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self._counted_threads.add(threading.get_ident())
            try:
                return function(*args, **named)
            finally:
                self._counted_threads.discard(threading.get_ident())

        return call


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
        plugins = manager.PluginManager()
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

    def chat(self, messages: list[dict[str, str]]) -> int:
        return self._generate("/v1/chat/completions", messages=messages, max_tokens=4)

    def complete(self, prompt: str) -> int:
        return self._generate("/v1/completions", prompt=prompt, max_tokens=1)

    def _generate(self, path: str, **body: Any) -> int:
        """Return the number of prompt tokens that were not computed."""
        status, content = self.ask("POST", path, {**body, "temperature": 0.0})
        assert status == 200, content
        n_cached: int = json.loads(content)["usage"]["prompt_tokens_details"]["cached_tokens"]
        return n_cached

    def settle(self, *, forget: bool) -> None:
        """Wait until all turns are on disk; with `forget`, remove them from RAM."""
        store = self.plugin._store
        assert store is not None
        wait_until(lambda: self.ask("GET", "/v1/kvpersist/stats")[0] == 200, "statistics")
        store.drain()
        if forget:
            store.pool.clear()


def traced(folder: Path) -> dict[str, Functions]:
    trace, model = Trace(), make_tiny_model(folder / "model")
    with trace.journey() as start:
        server = Server(model, folder / "store")
    server.complete(synthetic_text(300, seed=0))
    server.settle(forget=False)
    prompt = synthetic_text(900, seed=1)
    with trace.journey((manager.Taken, "insert"), threads=("kvpersist-writer",)) as save:
        server.complete(prompt)
        server.settle(forget=True)
    generator = importlib.import_module("mlx_lm_kvpersist.host.scheduling.response_generator")
    entries = (generator, "take_request"), (manager.Taken, "enter")
    with trace.journey(*entries, threads=("kvpersist-read",)) as restore:
        n_restored = server.complete(prompt)
    assert n_restored > 0, "nothing was restored"
    messages = [
        {"role": "system", "content": synthetic_text(300, seed=2)},
        {"role": "user", "content": synthetic_text(300, seed=3)},
    ]
    server.chat(messages)
    server.settle(forget=False)
    with trace.journey() as chat:
        server.chat(messages)
    return {"start": start, "save": save, "restore": restore, "chat": chat}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="name the functions of each file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            found = traced(Path(folder))
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # without waiting for the server's threads
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
    os._exit(0)  # without waiting for the server's threads


if __name__ == "__main__":
    main()
