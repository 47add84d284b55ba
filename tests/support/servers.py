"""Servers that end with the test that started them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .server_process import ServerProcess

FULL_PRECISION = ("--kvpersist-kv-bits", "16")
"""Options with which replies are computed as by stock."""
AT_ONCE = ("-m", "tests.support.at_once")
"""The launcher of a server that postpones no checkpoint and waits for the shared store."""


class StartServer:
    """Start servers for one test; `close` ends them all."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"  # where `with_plugin` keeps its blocks
        self._folder = folder
        self._servers: list[ServerProcess] = []

    def __call__(self, model: Path, *extra: str, **options: Any) -> ServerProcess:
        """Start the stock server; `options` are ServerProcess's."""
        log_path = self._folder / f"server-{len(self._servers) + 1}.log"
        server = ServerProcess(model, *extra, **{"log_path": log_path, **options})
        self._servers.append(server)
        server.start()
        return server

    def with_plugin(self, model: Path, *extra: str, **options: Any) -> ServerProcess:
        """Start the server as users do, with the plugin, on this test's own store."""
        plugin = ("--plugin", "kvpersist", "--kvpersist-dir", str(self.store))
        return self(model, *plugin, *extra, **options)

    def close(self) -> None:
        """Kill the running servers: tests of a server's end have already ended it."""
        for server in self._servers:
            if server.alive:
                server.kill9()
