"""The conditions of a measurement: the machine, the versions, the speed of MLX's CPU backend."""

from __future__ import annotations

import json
import os
import platform
import sys
import timeit
from collections.abc import Mapping
from contextlib import suppress
from ctypes.util import find_library
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..units import show_bytes

_PACKAGES = ("mlx", "mlx-lm", "mlx-lm-kvpersist", "transformers")
_SIZE, _REPEATS = 384, 3
_SLOW_GFLOPS = 10.0
"""A core reaches several times this with OpenBLAS, and a fifth of it with the reference BLAS."""


def versions() -> dict[str, str]:
    releases = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):  # not installed, e.g. a checkout
            releases[name] = version(name)
    return releases


def device() -> dict[str, Any]:
    """Return what MLX and the system report about the machine, and any preloaded library."""
    import mlx.core as mx

    preloaded = os.environ.get("LD_PRELOAD")
    return {
        **mx.device_info(),
        **({"preloaded": preloaded} if preloaded else {}),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "kind": "cpu" if mx.default_device() == mx.Device(mx.cpu) else "gpu",
    }


def cpu_gflops() -> float | None:
    """Return the GFLOP/s of a float32 matrix product, or None if MLX uses a GPU."""
    import mlx.core as mx

    matrix = mx.random.uniform(shape=(_SIZE, _SIZE))
    mx.eval(matrix @ matrix)
    if device()["kind"] != "cpu":
        return None
    times_s = timeit.repeat(lambda: mx.eval(matrix @ matrix), number=1, repeat=_REPEATS)
    return 2e-9 * _SIZE**3 / min(times_s)


def openblas_advice(gflops: float | None) -> str:
    """Return how to preload OpenBLAS if a CPU seems to compute without it; otherwise ""."""
    if gflops is None or gflops >= _SLOW_GFLOPS or sys.platform != "linux":
        return ""
    library = find_library("openblas")
    first = "" if library else "install OpenBLAS (Debian, Ubuntu: libopenblas0-pthread), then "
    start = f"LD_PRELOAD={library or 'libopenblas.so.0'} OPENBLAS_NUM_THREADS=1 mlx_lm.server …"
    return f"{first}start the server as {start}"


def conditions(content: Mapping[str, Any]) -> list[str]:
    releases, device, model = content["versions"], content["device"], content["model"]
    bits = f", {model['weight_bits']}-bit" if model["weight_bits"] else ""
    memory = f", {show_bytes(n_bytes)}" if (n_bytes := device.get("memory_size")) else ""
    cpu = f", {gflops:.3g} GFLOP/s" if (gflops := content["cpu_gflops"]) else ""
    return [
        f"mlx-lm-kvpersist {releases.get('mlx-lm-kvpersist', 'not installed')}, "
        f"mlx-lm {releases['mlx-lm']}, mlx {releases['mlx']}, Python {releases['python']}",
        f"{device.get('device_name')}, {device['kind']}{memory}{cpu}, {device['platform']}, "
        f"{device['processors']} processors, load {content['load_before']} before",
        f"{model['name']} ({model['type']}{bits}, {model['weights']})",
    ]


if __name__ == "__main__":
    # `doctor` runs this.
    import mlx.core as mx

    print(json.dumps([str(mx.default_device()), cpu_gflops()]))
