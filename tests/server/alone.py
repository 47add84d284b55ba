"""Run command-line clients that can reach only this machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

NOWHERE = "http://127.0.0.1:9"
"""A proxy that does not answer. Clients use it for every address except this machine's."""


def run_alone(home: Path, folder: Path, command: Sequence[str | Path], **variables: str) -> str:
    """Run a command in `folder`; return its output.

    The environment has only PATH, HOME, the proxies and `variables`.
    """
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "HTTP_PROXY": NOWHERE,
        "HTTPS_PROXY": NOWHERE,
        "NO_PROXY": "127.0.0.1",
        **variables,
    }
    done = subprocess.run(
        list(map(str, command)),
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
