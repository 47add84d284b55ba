"""The sides of a comparison: a real server for each, with the same model and the same prompts."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

from mlx_lm_kvpersist.api.admin import REQUESTS_PATH, SPEC_PATH, STATS_PATH
from mlx_lm_kvpersist.cli.machine import device
from mlx_lm_kvpersist.config import DEFAULT_BITS
from tests.support import Reply
from tests.support.ranks import RankedServer
from tests.support.synthetic import Message, synthetic_text

from .checks import SERVED, Expected, WrongMeasurement, check_kept, check_outcome
from .page_cache import drop_cached_pages

REPOSITORY = Path(__file__).parent.parent
STOCK, OURS, OURS_16, BEFORE = "stock", "ours", "ours-16", "before"
_QUIET_S = 0.3
"""The store is complete if the server has written nothing for this time."""


@dataclass(frozen=True)
class Side:
    """One way to run the server. `{store}` in the flags stands for the side's own folder."""

    name: str
    flags: tuple[str, ...]
    bits: str | None = None
    """The value of --kvpersist-kv-bits that the side measures; None without the plugin."""
    checkout: Path = REPOSITORY
    """The checkout whose code the server runs."""


# Budgets that no benchmark reaches. Stock keeps ten prompts by default, which are too few.
_PLUGIN = (
    *("--plugin", "kvpersist", "--kvpersist-dir", "{store}"),
    *("--kvpersist-min-free", "0", "--kvpersist-disk", "48G"),
)
SIDES = {
    side.name: side
    for side in (
        Side(STOCK, ("--prompt-cache-size", "64")),
        Side(OURS, _PLUGIN, DEFAULT_BITS),
        Side(OURS_16, (*_PLUGIN, "--kvpersist-kv-bits", "16"), "16"),
    )
}


def before_side(checkout: Path) -> Side:
    """Return the side that runs the code of another checkout with the default options.

    Raises SystemExit if the folder has no package.
    """
    if not (checkout / "mlx_lm_kvpersist").is_dir():
        raise SystemExit(f"--before {checkout} is not a checkout: it has no mlx_lm_kvpersist")
    return replace(SIDES[OURS], name=BEFORE, checkout=checkout.resolve())


class BenchmarkServer(RankedServer):
    """The server of one side.

    gpus: the values of CUDA_VISIBLE_DEVICES for its ranks; if empty, the environment's value stays.
    """

    def __init__(
        self,
        model: Path,
        side: Side,
        folder: Path,
        env: Mapping[str, str] | None = None,
        n_ranks: int = 1,
        gpus: Sequence[str] = (),
    ) -> None:
        self.side, self.gpus = side, gpus
        self.store = folder / f"store-{side.name}"
        path = (str(side.checkout), os.environ.get("PYTHONPATH", ""))
        super().__init__(
            model,
            *(flag.replace("{store}", str(self.store)) for flag in side.flags),
            # Another checkout may have no server.py, so this checkout's file starts all servers.
            launcher=(str(REPOSITORY / "benchmarks" / "server.py"),),
            env={
                # Set before the start: a .pth file imports the package before the launcher runs.
                "PYTHONPATH": os.pathsep.join(filter(None, path)),
                # Let the first start compile a checkout, as an installation compiles a package.
                "PYTHONDONTWRITEBYTECODE": "",
                **(env or {}),
            },
            log_path=folder / f"{side.name}.log",
            start_timeout_s=600.0,
            request_timeout_s=600.0,
            n_ranks=n_ranks,
        )

    def __enter__(self) -> BenchmarkServer:
        self.start()
        return self

    def env_of_rank(self, rank: int) -> dict[str, str]:
        gpu = {"CUDA_VISIBLE_DEVICES": self.gpus[rank]} if self.gpus else {}
        return {**super().env_of_rank(rank), **gpu}

    def finish(self) -> None:
        """With the plugin, other ranks first write what they store."""
        self.terminate(timeout_s=60.0)
        if self.side.bits is not None:
            self.wait_for_others(60.0)

    def ask(
        self, messages: Sequence[Message], max_tokens: int, expected: Expected, **params: Any
    ) -> Reply:
        """Send a conversation, greedy and streamed.

        Raises WrongMeasurement unless the request was served as `expected`.
        """
        params = {"temperature": 0.0, **params}
        reply = self.chat(messages, stream=True, max_tokens=max_tokens, **params)
        outcome = self.outcome(reply) if self.side.bits else None
        check_outcome(self.side.name, expected, reply.cached_tokens, outcome)
        return reply

    def outcome(self, reply: Reply) -> dict[str, Any]:
        """Return the plugin's outcome, also if the stream began before the lookup."""
        outcome: dict[str, Any] = reply.kvpersist
        if outcome.get("outcome") != "PENDING":
            return outcome
        request_id = reply.headers["x-kvpersist-request"]
        for record in self.get(REQUESTS_PATH):
            if record["id"] == request_id:
                return dict(record)
        raise WrongMeasurement(f"the run ends: {self.side.name} has no record of {request_id}")

    def get(self, path: str) -> Any:
        status, _, body = self.request("GET", path)
        if status != 200:
            raise RuntimeError(f"{self.side.name} answered {status} to {path}")
        return json.loads(body)

    def check_kept(self) -> None:
        """Raise WrongMeasurement unless the server stores caches in the side's precision."""
        if self.side.bits is not None:
            check_kept(self.side.name, self.get(SPEC_PATH), self.side.bits)

    def settle(self, timeout_s: float = 120.0) -> None:
        """Wait until the server has written everything."""
        if self.side.bits is None:
            return
        seen, deadline = None, time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            store = self.get(STATS_PATH)["store"]
            now = (store["tiers"]["disk"]["written_bytes"], store["turns_saved"])
            if now == seen and not store["queue"]["tasks"]:
                return
            seen = now
            time.sleep(_QUIET_S)  # ask seldom: the measured time includes these requests
        raise TimeoutError(f"{self.side.name} has not written everything in {timeout_s:.0f} s")

    def cpu_s(self) -> float | None:
        """Return the CPU seconds of the process until now; None on systems without /proc."""
        path = Path(f"/proc/{self.pid}/stat")
        if not path.exists():
            return None
        fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # user, system


class Fleet:
    """The running servers of all sides, for a `with` block.

    If CUDA_VISIBLE_DEVICES names several GPUs, the servers are spread over them. Raises SystemExit
    if the GPUs cannot be divided among servers of `n_ranks` GPUs each.
    """

    def __init__(self, model: Path, sides: Sequence[Side], n_ranks: int = 1) -> None:
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if n_ranks > 1 and device()["kind"] == "gpu" and len(gpus) % n_ranks:
            raise SystemExit(f"CUDA_VISIBLE_DEVICES must name a multiple of {n_ranks} GPUs")
        self._folder = Path(tempfile.mkdtemp(prefix="kvpersist-bench-"))
        # An MLX process keeps the GPU memory that it has used: one GPU may be too small for two
        # servers.
        groups = [gpus[n : n + n_ranks] for n in range(0, len(gpus), n_ranks)]
        self.servers = {
            side.name: BenchmarkServer(model, side, self._folder, n_ranks=n_ranks, gpus=group)
            for side, group in zip(sides, cycle(groups if len(gpus) > 1 else [[]]), strict=False)
        }

    def __enter__(self) -> Fleet:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> BenchmarkServer:
        return self.servers[name]

    @property
    def sides(self) -> list[str]:
        return list(self.servers)

    def start(self) -> None:
        """Start all servers, and let each compile its kernels.

        Raises WrongMeasurement if a server does not store caches in its side's precision.
        """
        # A GPU compiles the kernels of a prompt of several chunks when they are first used.
        n_chars = 12_000 if device()["kind"] == "gpu" else 100
        warm_up: Message = {"role": "user", "content": f"Warm up: {synthetic_text(n_chars)}"}
        self._each(lambda server: server.start())
        for server in self.servers.values():
            server.check_kept()
        self._each(lambda server: server.ask([warm_up], 16, SERVED))
        for server in self.servers.values():
            server.check_kept()
            server.settle()

    def restart(self) -> float | None:
        """Restart all servers with their stores dropped from the page cache.

        Return the share of the pages that are still cached; None if the system cannot drop pages.
        """
        for server in self.servers.values():
            server.settle()
        self._each(lambda server: server.finish())
        stores = [server.store for server in self.servers.values() if server.store.exists()]
        files = [path for store in stores for path in store.rglob("*") if path.is_file()]
        share = drop_cached_pages(files)
        self.start()
        return share

    def close(self) -> None:
        try:
            self._each(lambda server: server.stop())
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _each(self, action: Callable[[BenchmarkServer], object]) -> None:
        with ThreadPoolExecutor(max(1, len(self.servers))) as pool:
            list(pool.map(action, self.servers.values()))


def rotated(sides: Sequence[str], turn: int) -> list[str]:
    """Each turn begins with another side, so that drifts affect all sides equally."""
    start = turn % len(sides)
    return [*sides[start:], *sides[:start]]
