"""A server whose model several processes compute, as `mlx.launch` starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any, ClassVar

from .server_process import HOST, ServerProcess, free_port
from .zygote import Zygote


class RankedServer(ServerProcess):
    """Rank 0 is the HTTP server; `others` are the processes of the other ranks, if any.

    Only MLX's ring and the server's own code start and end the ranks together. The others get
    the options `others_extra`, too.
    """

    zygotes: ClassVar[dict[str, Sequence[Zygote]]] = {}

    def __init__(
        self, *args: Any, n_ranks: int = 2, others_extra: Sequence[str] = (), **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.n_ranks, self.others_extra = n_ranks, others_extra
        self.others: list[subprocess.Popen[bytes]] = []
        self._hosts = self.log_path.with_name(f"{self.log_path.name}.hosts")

    def __enter__(self) -> RankedServer:
        super().__enter__()
        return self

    def _start_once(self) -> None:
        self.end_others()
        self.port = self.port or free_port()
        addresses = [[f"{HOST}:{free_port()}"] for _ in range(self.n_ranks)]
        self._hosts.write_text(json.dumps(addresses), encoding="utf-8")
        own = dict(self.env)
        for rank in range(1, self.n_ranks):
            with self.log_path.open("ab") as log:
                self.others.append(
                    subprocess.Popen(
                        [*self.command, *self.others_extra],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **own, **self.env_of_rank(rank)},
                    )
                )
        self.env = {**own, **self.env_of_rank(0)}
        try:
            super()._start_once()
        except BaseException:
            self.end_others()
            raise
        finally:
            self.env = own

    def env_of_rank(self, rank: int) -> dict[str, str]:
        """Return {} if the model has only one rank."""
        if self.n_ranks == 1:
            return {}
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        return {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(self._hosts), **threads}

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            self.end_others()
            self._hosts.unlink(missing_ok=True)

    def kill_all(self) -> None:
        for other in self.others:
            other.kill()
        self.kill9()
        self.end_others()

    def end_others(self, number: signal.Signals = signal.SIGKILL) -> None:
        for other in self.others:
            other.send_signal(number)
            other.wait(60)
        self.others = []

    def wait_for_others(self, timeout_s: float = 30.0) -> list[int]:
        """Wait until the other ranks have ended on their own."""
        return [other.wait(timeout_s) for other in self.others]
