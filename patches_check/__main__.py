"""`python -m patches_check`: the self-test, for CI. `--matrix` prints the versions to run it with.

An mlx-lm is listed with the oldest and the newest mlx that it is known to serve with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from mlx_lm_kvpersist.cli import main as cli
from mlx_lm_kvpersist.host import versions


def matrix() -> list[dict[str, str]]:
    """Return the pairs to check, as CI services take them."""
    return [
        {"mlx-lm": versions.text(pair.mlx_lm), "mlx": versions.text(mlx)}
        for pair in versions.PAIRS
        for mlx in (pair.oldest_mlx, pair.newest_mlx)
    ]


def main(argv: Sequence[str]) -> int:
    """Run the self-test, or print the matrix."""
    if list(argv) == ["--matrix"]:
        print(json.dumps(matrix()))
        return 0
    return cli.main(["selftest", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
