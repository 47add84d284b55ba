"""Servers that end with the test that started them."""

from __future__ import annotations

from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from mlx_lm_kvpersist.store.block_store import BlockStore
from mlx_lm_kvpersist.store.index import Index
from mlx_lm_kvpersist.store.records import StoreLimits
from mlx_lm_kvpersist.store.seal import PLAIN, read_key

from .server_process import ServerProcess

UNMEASURED = (
    *("--kvpersist-attention", "dequantize"),
    *("--kvpersist-kv-bits", "4"),
    *("--kvpersist-kv-rotate", "off"),
)
"""Options with which nothing is measured when a model is loaded."""
_FOUND_OUT = "SELECT key FROM state WHERE key LIKE 'round-trip/%' OR key LIKE 'model/%'"


class StartServer:
    """Start servers for one test; `close` ends them all."""

    _found_out: ClassVar[dict[str, Any]] = {}
    """What earlier servers of this process found out of models, as their indexes have it."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"  # where `with_plugin` keeps its blocks
        self._folder = folder
        self._stack = ExitStack()
        self._n_started = 0

    def __call__(self, model: Path, *extra: str, **options: Any) -> ServerProcess:
        """Start the stock server with further arguments; `options` are ServerProcess's."""
        self._n_started += 1
        options.setdefault("log_path", self._folder / f"server-{self._n_started}.log")
        return self._stack.enter_context(ServerProcess(model, *extra, **options))

    def with_plugin(self, model: Path, *extra: str, **options: Any) -> ServerProcess:
        """Start the server with the plugin, on this test's own store.

        Neither attention nor the precision is measured: that is a second a start, and no test's
        business but its own. What an earlier server found out of a model, and the round trip's
        result, are put into a new store, unless a test wants to see that (examined=False): they
        take more than half of a start's CPU time.
        """
        plugin = ["--plugin", "kvpersist", "--kvpersist-dir", str(self.store)]
        for option, value in zip(UNMEASURED[::2], UNMEASURED[1::2], strict=True):
            if option not in extra:
                plugin += [option, value]
        is_new = not self.store.exists() and options.get("examined", True)
        given = dict(pairwise(extra)).get("--kvpersist-encrypt")
        sealing = read_key(Path(given)) if given else PLAIN
        if is_new and self._found_out:
            limits = StoreLimits(0, 64 << 20)
            with closing(BlockStore(self.store, limits, sealing=sealing)) as store:
                store.change_index("tell what is known", self._put_found_out)
        server = self(model, *plugin, *extra, **options)
        if is_new and self.store.exists():
            path = self.store / "index.sqlite"
            with closing(Index(path, whole=False, sealing=sealing)) as index:
                for (key,) in index.ask(_FOUND_OUT):
                    self._found_out[key] = index.state.get(key)
        return server

    def _put_found_out(self, index: Index) -> None:
        for key, value in self._found_out.items():
            index.state.put(key, value)

    def close(self) -> None:
        self._stack.close()
