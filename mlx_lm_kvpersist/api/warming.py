"""Prompts that are computed when the server starts, before anybody asks for them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

from .admin import KEY_VARIABLE

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
"""Hosts that mean every address of this machine, and where such a server is asked."""


def warm_at_start(
    files: Sequence[Path], host: str, port: int, folder: Path, key: str | None
) -> None:
    """Have `mlx-lm-kvpersist sessions warm` send each file, once the server answers.

    Returns at once; the log says what came of each.
    """
    host = _ANY.get(host, host)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run() -> None:
        opener = build_opener(ProxyHandler({}))
        while True:
            try:
                opener.open(f"{url}/health", timeout=10).close()
                break
            except (OSError, HTTPException):  # it does not listen yet, or its model is loading
                time.sleep(_POLL_S)
        options = ("--url", url, "--kvpersist-dir", str(folder))
        environment = {**os.environ, **({KEY_VARIABLE: key} if key else {})}
        for file in files:
            command = [sys.executable, "-m", "mlx_lm_kvpersist", "sessions", "warm", *options]
            done = subprocess.run(
                [*command, str(file)], env=environment, capture_output=True, text=True, check=False
            )
            said = (done.stderr or done.stdout).strip()
            level = logging.ERROR if done.returncode else logging.INFO
            logger.log(level, "kvpersist: %s: %s", file, said)

    threading.Thread(target=run, name="kvpersist-warm", daemon=True).start()
