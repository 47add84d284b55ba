"""`mlx_lm.server`, with or without plugins, that says when asked what memory and CPU it took.

    python -m benchmarks.measured_server --model … [--plugin kvpersist]

No code of the server is touched; resets of MLX's peak are noted. On SIGUSR1 the process writes
MLX's and the kernel's numbers to the file that MEMORY_FILE names, and forgets the peaks. It needs
neither a .pth file nor an installed package to load the plugin.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from importlib.metadata import entry_points
from pathlib import Path

import mlx.core as mx

from mlx_lm_kvpersist._startup import serve
from mlx_lm_kvpersist.host.stopping import requested_plugins

MEMORY_FILE = "BENCHMARK_MEMORY_FILE"
"""The environment variable that names the file."""

_GROUP = "mlx_lm.server.plugins"


_resets_peak = mx.reset_peak_memory
_peaks: list[int] = []
"""Those that the plugin forgot since the last signal: it measures each chunk of a prompt."""


def note_peak() -> None:
    """Forget MLX's peak as `mx.reset_peak_memory` does, but note it."""
    _peaks[:] = [max([mx.get_peak_memory(), *_peaks])]
    _resets_peak()


def main() -> None:
    if path := os.environ.get(MEMORY_FILE):
        mx.reset_peak_memory = note_peak
        signal.signal(signal.SIGUSR1, lambda *_: tell_memory(Path(path)))
    argv = sys.argv[1:]
    if requested_plugins(argv):
        provide_entry_point()
        serve(argv)
        return
    sys.argv = ["mlx_lm.server", *argv]
    importlib.import_module("mlx_lm.server").main()


def provide_entry_point() -> None:
    """Let `--plugin kvpersist` be found where the package is on PYTHONPATH and not installed."""
    if entry_points(group=_GROUP, name="kvpersist"):
        return
    folder = Path(tempfile.mkdtemp(prefix="kvpersist-bench-"))
    about = folder / "mlx_lm_kvpersist_checkout.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: mlx-lm-kvpersist-checkout\nVersion: 0\n")
    line = "kvpersist = mlx_lm_kvpersist.plugin:KVPersistPlugin"
    (about / "entry_points.txt").write_text(f"[{_GROUP}]\n{line}\n")
    sys.path.append(str(folder))


def tell_memory(path: Path) -> None:
    """Write bytes: MLX's arrays now and at most, MLX's free buffers, the process at most.

    And the seconds that the process has computed, on all cores together.
    """
    told = {
        "active": mx.get_active_memory(),
        "peak": max([mx.get_peak_memory(), *_peaks]),
        "free_buffers": mx.get_cache_memory(),
        "peak_rss": peak_rss_bytes(),
        "cpu_s": time.process_time(),
    }
    _resets_peak()
    _peaks.clear()
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(told), encoding="utf-8")
    os.replace(temporary, path)


def process_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process until now; 0 on systems without /proc."""
    path = Path(f"/proc/{pid}/stat")
    if not path.exists():
        return 0.0
    fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # user, system


def peak_rss_bytes() -> int:
    """Return the most memory that the process had, since the last call where Linux allows that."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="ascii").splitlines() if status.exists() else []
    peaks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
    if not peaks:  # macOS, and some sandboxes
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        pass  # then it stays the peak of the whole life, which the page says
    return peaks[0]


if __name__ == "__main__":
    main()
