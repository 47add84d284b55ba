"""`python -m models_check.evaluate PART PARTS SEED`: print the facts of a part of the zoo.

Every line is JSON: a name, and an `Evaluated` as an object. The models run on the CPU.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import mlx.core as mx

from mlx_lm_kvpersist.cli.quality_checks import server_attention

from .build import build
from .configs import available
from .facts import evaluated


def main(number: int, n_processes: int, seed: int) -> None:
    """Evaluate every name whose index is `number` modulo `n_processes`."""
    mx.set_default_device(mx.Device(mx.cpu))
    with server_attention():
        for name in available()[number::n_processes]:
            print(json.dumps([name, asdict(evaluated(build(name, seed)))]), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
