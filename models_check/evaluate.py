"""`python -m models_check.evaluate PART PARTS SEED`: print the facts of a part of the zoo.

Every line is JSON: a name, its facts, and by how much its runs differed. The models run on the CPU.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import mlx.core as mx

from .build import build
from .configs import available
from .facts import facts_of, server_attention


def main(part: int, parts: int, seed: int) -> None:
    """Evaluate every name whose place is `part` modulo `parts`."""
    mx.set_default_device(mx.Device(mx.cpu))
    with server_attention():
        for name in available()[part::parts]:
            found = facts_of(build(name, seed))
            line = [name, asdict(found.architecture), found.differences]
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
