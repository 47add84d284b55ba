"""Start `mlx_lm.server`, with or without plugins; the plugin need not be installed.

    PYTHONPATH=CHECKOUT python benchmarks/server.py --model … [--plugin kvpersist]

The plugin is the package that Python finds first, so this file also starts other checkouts.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from importlib.metadata import entry_points
from pathlib import Path

_GROUP = "mlx_lm.server.plugins"


def main() -> None:
    # Otherwise modules here, such as `models`, could hide modules of other packages.
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
    argv = sys.argv[1:]
    if "--plugin" in argv:
        provide_entry_point()
        # Not at the top: this import must not slow down the start of the stock server.
        from mlx_lm_kvpersist._startup import serve

        serve(argv)
        return
    sys.argv = ["mlx_lm.server", *argv]
    importlib.import_module("mlx_lm.server").main()


def provide_entry_point() -> None:
    """Make `--plugin kvpersist` work if the package is on PYTHONPATH and not installed."""
    if entry_points(group=_GROUP, name="kvpersist"):
        return
    folder = Path(tempfile.mkdtemp(prefix="kvpersist-bench-"))
    metadata = folder / "mlx_lm_kvpersist_checkout.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: mlx-lm-kvpersist-checkout\nVersion: 0\n")
    line = "kvpersist = mlx_lm_kvpersist.plugin:KVPersistPlugin"
    (metadata / "entry_points.txt").write_text(f"[{_GROUP}]\n{line}\n")
    sys.path.append(str(folder))


if __name__ == "__main__":
    main()
