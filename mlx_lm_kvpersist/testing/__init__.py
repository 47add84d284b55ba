"""The real `mlx_lm.server` in a subprocess, and a client for it: standard library only.

The demo, the tests and the benchmarks share it. It binds loopback, works offline, and signals
no process but the one that it started.
"""

from .reply import OUTCOME_HEADER, Reply, ServerError, parse_outcome
from .server_process import HOST, ServerProcess, free_port

__all__ = [
    "HOST",
    "OUTCOME_HEADER",
    "Reply",
    "ServerError",
    "ServerProcess",
    "free_port",
    "parse_outcome",
]
