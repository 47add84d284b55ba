"""The conditions of a measurement: the machine, the versions, the BLAS of MLX's CPU backend.

MLX's wheel for Linux brings netlib's reference BLAS. A server that computes prompts with it takes
many times as long as with OpenBLAS; `doctor` and `bench` say so.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
import time
from ctypes.util import find_library
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

_PACKAGES = ("mlx", "mlx-lm", "mlx-lm-kvpersist", "transformers")
_PRODUCT = "cblas_sgemm"
_OPTIMISED = ("openblas_get_config", "mkl_get_version", "bli_info_get_version_str")
"""Functions that OpenBLAS, MKL and BLIS export, and netlib's reference BLAS does not."""
_SIZE, _REPEATS = 384, 3


@dataclass(frozen=True)
class Blas:
    """The library that computes MLX's products of matrices on this CPU.

    file: its path. gflops: 10^9 operations a second in a float32 product of 384 x 384, the best of
    three.
    """

    file: str
    is_reference: bool
    gflops: float

    def __str__(self) -> str:
        kind = ", the reference BLAS" if self.is_reference else ""
        return f"{Path(self.file).name}{kind}, {self.gflops:.3g} GFLOP/s"


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}


@cache
def device() -> dict[str, Any]:
    """Return what MLX and the system say of the machine, and which BLAS takes MLX's place."""
    import mlx.core as mx

    preloaded = os.environ.get("LD_PRELOAD")
    return {
        **mx.device_info(),
        **({"preloaded": preloaded} if preloaded else {}),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "kind": "cpu" if mx.default_device() == mx.Device(mx.cpu) else "gpu",
    }


def blas() -> Blas | None:
    """Return what computes MLX's products in this process; None on a GPU and where none is found.

    The dynamic linker takes a preloaded library before the one that MLX was linked with.
    """
    if sys.platform != "linux" or device()["kind"] != "cpu":
        return None
    host = next((name for *_, name in _mapped() if name.endswith("/libmlx.so")), None)
    for place in (None, host):
        library = ctypes.CDLL(place)
        if hasattr(library, _PRODUCT):
            address = ctypes.cast(getattr(library, _PRODUCT), ctypes.c_void_p).value or 0
            file = next((name for begin, end, name in _mapped() if begin <= address < end), None)
            if file is not None:
                own = ctypes.CDLL(file)
                is_reference = not any(hasattr(own, name) for name in _OPTIMISED)
                return Blas(file, is_reference, _gflops())
    return None


def openblas_advice() -> str:
    """Return how to preload OpenBLAS, as a sentence."""
    library = find_library("openblas")
    first = "" if library else "install OpenBLAS (Debian, Ubuntu: libopenblas0-pthread), then "
    start = f"LD_PRELOAD={library or 'libopenblas.so.0'} OPENBLAS_NUM_THREADS=1 mlx_lm.server …"
    return f"{first}start the server as {start}"


def _mapped() -> list[tuple[int, int, str]]:
    """Return (begin, end, file) of what is mapped into this process, see proc(5)."""
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, *_, name = f"{line} ".split(" ", 5)
        begin, _, end = span.partition("-")
        found.append((int(begin, 16), int(end, 16), name.strip()))
    return found


def _gflops() -> float:
    import mlx.core as mx

    matrix = mx.random.uniform(shape=(_SIZE, _SIZE))
    mx.eval(matrix)
    best_s = float("inf")
    for _ in range(_REPEATS):
        started = time.perf_counter()
        mx.eval(matrix @ matrix)
        best_s = min(best_s, time.perf_counter() - started)
    return 2e-9 * _SIZE**3 / best_s


if __name__ == "__main__":
    # `doctor` asks in a process of its own, because MLX can abort.
    found_blas = blas()
    print(json.dumps(found_blas and asdict(found_blas)))
