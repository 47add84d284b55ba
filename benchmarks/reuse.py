"""Whether reusing what a prompt has in common with a stored one is ever slower than not to.

    python -m benchmarks.reuse

A real server that holds next to nothing in RAM, so that every restore reads the disk. Prompts part
from a stored one at several places; the same prompts, in a namespace of their own, are computed
from nothing. Both kinds take turns.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support import ServerProcess
from tests.support.synthetic import make_tiny_model, synthetic_text

from .report import Result
from .runs import parsed_out

N_CHARS = 4_000
N_REPEATS = 3
CUTS = (0.0, 0.02, 0.1, 0.5, 0.9)


def main() -> None:
    out = parsed_out(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(
            Path(folder) / "model", n_layers=2, n_heads=8, n_kv_heads=8, head_dim=64
        )
        store = str(Path(folder) / "store")
        plugin = ("--plugin", "kvpersist", "--kvpersist-dir", store, "--kvpersist-kv-bits", "4")
        budgets = ("--kvpersist-ram", "0", "--kvpersist-min-free", "0")
        with ServerProcess(model, *plugin, *budgets) as server:
            rows = measure(server)
    result = Result(
        "reuse-or-compute",
        "First token of a prompt that parts from a stored one, reused from disk over computed.",
        {"model": "tiny llama, 2 layers, 8 KV heads of 64", "repeats": N_REPEATS},
        folder=out,
    )
    result.add(*rows)
    result.show()


def measure(server: ServerProcess) -> list[dict[str, Any]]:
    stored = synthetic_text(N_CHARS, seed=1)
    server.chat([{"role": "user", "content": stored}], max_tokens=1)
    time.sleep(1)
    rows = []
    for cut in CUTS:
        at = int(len(stored) * cut)
        reused, computed, n_reused = [], [], []
        for n in range(N_REPEATS):
            # A beginning of its own behind the cut, so that no trial helps the next.
            other = synthetic_text(N_CHARS - at + 50, seed=1000 + n + int(cut * 1e5))
            messages = [{"role": "user", "content": stored[:at] + f"{n}{other}"}]
            ours = server.chat(messages, max_tokens=1, stream=True)
            alone = {"X-KVPersist-Namespace": f"{cut}-{n}"}
            cold = server.chat(messages, max_tokens=1, stream=True, headers=alone)
            assert cold.cached_tokens == 0
            n_reused.append(ours.cached_tokens)
            reused.append(ours.ttft_s * 1e3)
            computed.append(cold.ttft_s * 1e3)
        rows.append(
            {
                "parts at": f"{cut:.1%}",
                "prompt tokens": ours.prompt_tokens,
                "reused": int(statistics.median(n_reused)),
                "first token ms": statistics.median(reused),
                "computed ms": statistics.median(computed),
                "ratio": statistics.median(a / b for a, b in zip(reused, computed, strict=True)),
            }
        )
    return rows


if __name__ == "__main__":
    main()
