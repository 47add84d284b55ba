"""`python -m mlx_lm_kvpersist`: the command line."""

from __future__ import annotations

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
