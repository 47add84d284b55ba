"""Command-line clients that reach this machine only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

NOWHERE = "http://127.0.0.1:9"
"""A proxy that does not answer, for every address but this machine's."""


def run_alone(home: Path, folder: Path, command: Sequence[str | Path], **variables: str) -> str:
    """Run a command in a folder, with a home folder and no other variables; return its output.

    `variables` are set in its environment.
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
