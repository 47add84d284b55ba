"""Run `mlx_lm server` in which a function fails from its n-th call on, on one rank alone.

python -m tests.support.faulty MODULE:FUNCTION N RANK [SERVER OPTION ...]
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import wraps
from typing import Any


def break_function(target: str, n: int) -> None:
    """Let a function, or a method, raise from its n-th call on."""
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *parts, name = path.split(".")
    for part in parts:
        owner = getattr(owner, part)
    whole, n_calls = getattr(owner, name), 0

    @wraps(whole)
    def broken(*args: Any, **kwargs: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls >= n:
            raise RuntimeError(f"{target} fails, as was asked for")
        return whole(*args, **kwargs)

    setattr(owner, name, broken)


def main() -> None:
    target, n, rank, *options = sys.argv[1:]
    if os.environ.get("MLX_RANK") == rank:
        break_function(target, int(n))
    from mlx_lm_kvpersist._startup import serve

    serve(options)


if __name__ == "__main__":
    main()
