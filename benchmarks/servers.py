"""The sides of a comparison: one real server each, with the same model and the same prompts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from mlx_lm_kvpersist.api.admin import SPEC_PATH, STATS_PATH
from mlx_lm_kvpersist.cache.geometry.precision import parse_precision
from mlx_lm_kvpersist.cli.machine import device
from mlx_lm_kvpersist.config import KV_BITS
from tests.support import Reply, ServerProcess
from tests.support.synthetic import Message, synthetic_text

from .measured_server import MEMORY_FILE
from .page_cache import drop_cached_pages

REPOSITORY = Path(__file__).parent.parent
_SETTLED_S = 0.3
"""The store counts as written when nothing was written for so long."""


@dataclass(frozen=True)
class Side:
    """A way to run the server. `{store}` in its flags is a folder of its own."""

    name: str
    flags: tuple[str, ...]
    kv_bits: int
    checkout: Path = REPOSITORY
    """Whose code it runs."""

    @property
    def keeps(self) -> bool:
        """Whether it has a store."""
        return "--plugin" in self.flags


# Budgets that nothing here runs into. Stock would drop the prompts that are to be hot: 10 is few.
_PLUGIN = (
    *("--plugin", "kvpersist", "--kvpersist-dir", "{store}"),
    *("--kvpersist-min-free", "0", "--kvpersist-disk", "48G"),
)
_STOCK = ("--prompt-cache-size", "64")
SIDES = {
    side.name: side
    for side in (
        Side("ours", _PLUGIN, 6),  # keys 8 bits, values 4
        Side("ours-50ms", (*_PLUGIN, "--kvpersist-max-stall-ms", "50"), 6),
        Side("ours-4", (*_PLUGIN, "--kvpersist-kv-bits", "4"), 4),
        Side("ours-k6v4", (*_PLUGIN, "--kvpersist-kv-bits", "k6v4"), 5),
        Side("ours-8", (*_PLUGIN, "--kvpersist-kv-bits", "8"), 8),
        Side("ours-16", (*_PLUGIN, "--kvpersist-kv-bits", "16"), 16),
        Side("stock", _STOCK, 16),
        # By default stock leaves the first 5,000 tokens as they are.
        Side("stock-4", (*_STOCK, "--kv-bits", "4", "--quantized-kv-start", "0"), 4),
    )
}
DEFAULT_SIDES = ("ours", "stock", "stock-4")
BEFORE = "before"
"""The side that runs `ours` by the code of another checkout."""
_WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4}


class Fleet:
    """A server for each side, all running, for a `with` block. Requests go to one at a time."""

    def __init__(
        self,
        model: Path,
        sides: Iterable[str],
        extra: Sequence[str] = (),
        before: Path = REPOSITORY,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvpersist-bench-"))
        known = {**SIDES, BEFORE: replace(SIDES["ours"], name=BEFORE, checkout=before)}
        self.sides = {name: known[name] for name in sides}
        self.servers: dict[str, ServerProcess] = {}
        self.start_s = 0.0  # how long the last start of all took
        for name, side in self.sides.items():
            flags = [flag.replace("{store}", str(self.store(name))) for flag in side.flags]
            self.servers[name] = ServerProcess(
                model,
                *flags,
                *extra,
                launcher=("-m", "benchmarks.measured_server"),
                cwd=side.checkout,
                # A .pth file imports the package before the current folder is looked at.
                env={
                    MEMORY_FILE: str(self._memory_file(name)),
                    "PYTHONPATH": os.pathsep.join([str(side.checkout), *_python_path()]),
                },
                log_path=self.folder / f"{name}.log",
                start_timeout_s=900.0,
                request_timeout_s=900.0,
            )

    def __enter__(self) -> Fleet:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __getitem__(self, name: str) -> ServerProcess:
        return self.servers[name]

    @property
    def flags(self) -> dict[str, str]:
        """The options of each side, as a result names them."""
        return {name: " ".join(side.flags) for name, side in self.sides.items()}

    def start(self) -> None:
        """Start all servers and let each compute something, so that kernels are compiled.

        Raises SystemExit if a side of ours does not keep the model: it would be stock's twin.
        """
        # On a GPU a prompt of more than one chunk: each shape of a kernel is compiled once.
        n_chars = 12_000 if device()["kind"] == "gpu" else 100
        warm_up = [{"role": "user", "content": f"Warm up: {synthetic_text(n_chars)}"}]

        def start(server: ServerProcess) -> None:
            server.start()
            server.chat(warm_up, stream=True, max_tokens=16, temperature=0.0)

        started = time.monotonic()
        self._each(start)
        self.start_s = time.monotonic() - started
        for name, side in self.sides.items():
            if side.keeps:
                check_kept(self.told(name, SPEC_PATH))

    def restart(self, *, drop_page_cache: bool = False) -> float | None:
        """End all servers and start them again; the stores stay.

        Return what share of the stores' bytes is still in the page cache after it was dropped
        there, or None when it was not to be, or cannot be.
        """
        for name in self.sides:
            self.settle(name)
        self._each(lambda server: server.terminate(timeout_s=60.0))
        share = None
        if drop_page_cache:
            share = drop_cached_pages([p for name in self.sides for p in _files(self.store(name))])
        self.start()
        return share

    def close(self) -> None:
        self._each(lambda server: server.stop())
        shutil.rmtree(self.folder, ignore_errors=True)

    def store(self, name: str) -> Path:
        """Return the folder of a side's store; it is missing where a side has none."""
        return self.folder / f"store-{name}"

    def ask(self, name: str, messages: list[Message], max_tokens: int, **params: Any) -> Reply:
        """Send a conversation, greedy and streamed, and wait for the whole reply."""
        return self.servers[name].chat(
            messages, stream=True, max_tokens=max_tokens, temperature=0.0, **params
        )

    def told(self, name: str, path: str) -> dict[str, Any]:
        """Return what a side of ours says of itself."""
        status, _, body = self.servers[name].request("GET", path)
        if status != 200:
            raise RuntimeError(f"{name} answered {status} to {path}")
        said: dict[str, Any] = json.loads(body)
        return said

    def settle(self, name: str, timeout_s: float = 120.0) -> None:
        """Return when a side has written all that it has to; at once for those without a store."""
        if not self.sides[name].keeps:
            return
        deadline = time.monotonic() + timeout_s
        seen, since = None, time.monotonic()
        while time.monotonic() < deadline:
            store = self.told(name, STATS_PATH)["store"]
            now = (store["tiers"]["disk"]["written_bytes"], store["turns_saved"])
            if store["queue"]["tasks"] or now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > _SETTLED_S:
                return
            time.sleep(0.05)
        raise TimeoutError(f"{name} has not written everything within {timeout_s:.0f} s")

    def used(self, name: str) -> dict[str, float]:
        """Return a server's bytes and CPU seconds; it forgets the peaks (`measured_server`)."""
        path = self._memory_file(name)
        path.unlink(missing_ok=True)
        os.kill(self.servers[name].pid, signal.SIGUSR1)
        deadline = time.monotonic() + 5
        while not path.exists():
            if time.monotonic() > deadline:
                return {}  # some sandboxes deliver no signals
            time.sleep(0.01)
        told: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
        return told

    def kv_bytes_per_token(self) -> dict[str, float | None]:
        """Return the KV bytes of a token for each side; None where that is not known.

        Ours says it; those of stock follow from the shapes that ours found.
        """
        known: dict[str, float | None] = dict.fromkeys(self.sides)
        for name, side in self.sides.items():
            if side.keeps and (spec := self.told(name, SPEC_PATH))["kept"]:
                known[name] = float(spec["bytes_per_token"])
                for other, stock in self.sides.items():
                    if not stock.keeps:
                        known[other] = _stock_bytes_per_token(spec, stock.kv_bits)
        return known

    def _memory_file(self, name: str) -> Path:
        return self.folder / f"memory-{name}.json"

    def _each(self, action: Callable[[ServerProcess], Any]) -> None:
        with ThreadPoolExecutor(max(1, len(self.servers))) as pool:
            list(pool.map(action, self.servers.values()))


def check_kept(spec: dict[str, Any], bits: str | None = None) -> None:
    """Raise SystemExit if a server that answered `spec` does not keep its model.

    bits: an option of --kvpersist-kv-bits; every layer that grows must have its precision.
    """
    if not spec["kept"]:
        raise SystemExit(f"nothing is measured: the model is not kept: {spec['why_not']}")
    if bits is None:
        return
    choice = KV_BITS[bits]
    for group in spec["groups"]:
        precision = parse_precision(group["bits"] or "full")
        found = precision and (precision.keys.bits, precision.values.bits)
        if group["kind"] == "full" and found != (choice.key_bits, choice.value_bits):
            raise SystemExit(
                f"nothing is measured: layers are kept in {group['bits'] or 'full precision'}, "
                f"not in {bits}: {group['why_not_quantized'] or spec['precision']}"
            )


def cpu_between(before: dict[str, float], after: dict[str, float]) -> float | None:
    """Return the CPU seconds between two answers of `used`; None where one does not tell."""
    both = before.get("cpu_s"), after.get("cpu_s")
    return None if both[0] is None or both[1] is None else both[1] - both[0]


def rotated(sides: Sequence[str], turn: int) -> list[str]:
    """Return the sides, another one first each turn: what warms up or slows down hits all alike."""
    start = turn % len(sides)
    return [*sides[start:], *sides[:start]]


def _stock_bytes_per_token(spec: dict[str, Any], bits: int) -> float | None:
    """Return what stock takes for a token; with 4 bits, codes, and scale and bias per 64."""
    if any(group["kind"] != "full" for group in spec["groups"]):
        return None  # what slides or recurs does not grow with the tokens
    total = 0.0
    for group in spec["groups"]:
        for shape in (group["keys"], group["values"]):
            width = _WIDTHS[shape["dtype"]]
            a_number = width if bits == 16 else bits / 8 + 2 * width / 64
            total += len(group["slots"]) * shape["n_heads"] * shape["dim"] * a_number
    return total


def _python_path() -> list[str]:
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()] if folder.exists() else []
