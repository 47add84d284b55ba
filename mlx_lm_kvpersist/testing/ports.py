"""Ports of the loopback interface: one that is free, and which process listens on one."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

HOST = "127.0.0.1"
_LISTEN = "0A"
"""The state of a listening socket in /proc/net/tcp."""


def free_port() -> int:
    """Return a port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def listens(pid: int, port: int) -> bool:
    """Tell whether this process, and no other, listens on a TCP port of this machine."""
    table = Path("/proc/net/tcp")
    if not table.exists():  # macOS
        command = ["lsof", "-nP", "-a", "-p", str(pid), f"-iTCP:{port}", "-sTCP:LISTEN"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    rows = [line.split() for line in table.read_text().splitlines()[1:]]
    sockets = {
        f"socket:[{row[9]}]"
        for row in rows
        if row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port
    }
    try:
        descriptors = list(os.scandir(f"/proc/{pid}/fd"))
    except OSError:  # it has ended
        return False
    return any(_target(descriptor.path) in sockets for descriptor in descriptors)


def _target(link: str) -> str | None:
    try:
        return os.readlink(link)
    except OSError:  # closed meanwhile
        return None
