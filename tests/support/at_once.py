"""A server whose work does not depend on a clock.

It postpones no checkpoint, so `kill -9` loses nothing of a finished turn. It waits for the shared
store even if a tiny model would compute a prompt faster. `launcher=AT_ONCE` starts it in place of
`mlx_lm server`.
"""

from __future__ import annotations

import sys

from mlx_lm_kvpersist import config
from mlx_lm_kvpersist._startup import serve
from mlx_lm_kvpersist.store import shared

SHARED_S = 5.0

if __name__ == "__main__":
    config.MAX_LOSS_S = 0.0
    shared.LEAST_LOSS_S = shared.MOST_LOSS_S = SHARED_S
    serve(sys.argv[1:])
