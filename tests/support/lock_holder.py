"""A second process that has a store's lock."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HOLD = """
import sys
from pathlib import Path
from mlx_lm_kvpersist.store.folder import StoreLock

sys.argv = ["/somewhere/mlx-lm-kvpersist", "store", "rebuild", "--api-key", "secret"]
with StoreLock(Path(PATH)).held():
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def lock_holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that has the lock of a store; it is killed at the end."""
    code = _HOLD.replace("PATH", repr(str(folder / "lock")))
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as one:
        try:
            assert one.stdout is not None and one.stdout.readline() == "held\n"
            yield one
        finally:
            one.kill()
