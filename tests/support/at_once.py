"""A server that postpones no checkpoint: `kill -9` undoes no computing of a finished turn.

`launcher=AT_ONCE` starts it in place of `mlx_lm server`.
"""

from __future__ import annotations

import sys

from mlx_lm_kvpersist import config
from mlx_lm_kvpersist._startup import serve

if __name__ == "__main__":
    config.MAX_LOSS_S = 0.0
    serve(sys.argv[1:])
