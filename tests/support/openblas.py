"""OpenBLAS instead of the BLAS that MLX's Linux wheel brings.

`python -m tests.support.openblas COMMAND …` runs a command with it.
"""

from __future__ import annotations

import os
import sys
from ctypes.util import find_library


def openblas_env() -> dict[str, str]:
    """Return the environment variables with which a process preloads the system's OpenBLAS.

    MLX's wheel for Linux brings netlib's reference BLAS. OpenBLAS computes a matrix product on
    the CPU 15 to 45 times as fast, so the prefill of a real model takes seconds instead of minutes.
    The variables must be set before Python starts. With OpenBLAS a row's last bits can depend on
    how many rows are computed together, so tests that compare every bit do not use it.

    Returns {} on a Mac, whose MLX has no BLAS of its own, and on Linux without OpenBLAS.
    """
    if sys.platform != "linux":
        return {}
    library = find_library("openblas")
    if library is None:
        print(
            "OpenBLAS was not found: on a CPU, prompts take 15 to 45 times as long as with it "
            "(Debian and Ubuntu: apt-get install libopenblas0-pthread)",
            file=sys.stderr,
        )
        return {}
    preloaded = [library, os.environ.get("LD_PRELOAD", "")]
    n_threads = os.environ.get("OPENBLAS_NUM_THREADS", "1")  # measured with one thread
    return {"LD_PRELOAD": ":".join(filter(None, preloaded)), "OPENBLAS_NUM_THREADS": n_threads}


if __name__ == "__main__":
    os.execvpe(sys.argv[1], sys.argv[1:], {**os.environ, **openblas_env()})
