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
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

from .admin import KEY_VARIABLE
from .agents import OPENAPI_PATH

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_WAIT_S = 3600.0
"""How long a server may load its model, which may have to come over a network."""
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
        if why_not := _wait_for(url):
            logger.error("kvpersist: nothing is warmed: %s", why_not)
            return
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


def _wait_for(url: str) -> str:
    """Wait until this server answers; return "", or why it is not waited for any longer."""
    opener = build_opener(ProxyHandler({}))
    until_s = time.monotonic() + _WAIT_S
    asked = [OPENAPI_PATH, "/health"]
    while asked and time.monotonic() < until_s:
        try:
            opener.open(url + asked[0], timeout=10).close()
            del asked[0]
            continue
        except HTTPError as error:
            error.close()
            if (asked[0], error.code) != ("/health", 503):  # else its model is loading
                return f"{url} answers {error.code} to {asked[0]}, so it is another server's port"
        except (OSError, HTTPException):
            pass  # it does not listen yet
        time.sleep(_POLL_S)
    return f"{url} was not ready within {_WAIT_S:,.0f} s" if asked else ""
