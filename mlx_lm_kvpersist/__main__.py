"""`python -m mlx_lm_kvpersist`: the command line, and `server`, which needs no .pth file."""

from __future__ import annotations

import sys

from .cli import main as cli

if __name__ == "__main__":
    sys.exit(cli.main(with_server=True))
