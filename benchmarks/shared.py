"""The first token of a prompt that another server has put into a shared store, against computing.

    python -m benchmarks.shared [--model FOLDER] [--tokens 4096] [--mb-per-s 50 5 1]

One server computes prompts and puts them. For each line to the store a server with an empty disk
is then asked each of them twice: first with `X-KVPersist-Keep: no`, so that it is computed, then as
usual. Ratios are those of such pairs. The stores are a plain folder, and an S3 server (SeaweedFS)
of this machine, as it is and behind a link that is as slow as asked. CPU seconds are those of the
server's process until the first token.

A store that was too slow once is not asked for a while: then the worst ratio is what that cost, and
the median that of computing.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support import wait_until
from tests.support.bucket import Bucket
from tests.support.synthetic import Message

from .report import Result
from .runs import Run, median, parser, run_of
from .servers import Fleet, cpu_between

SIDE = "ours"
UNTHROTTLED = float("inf")
_SEED = 7_000_000
_NOT_KEPT = {"X-KVPersist-Keep": "no"}


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(sides=[SIDE])
    options.add_argument("--tokens", type=int, default=4096)
    options.add_argument("--mb-per-s", nargs="*", type=float, default=[50.0, 5.0, 1.0])
    options.add_argument("--repeats", type=int, default=3)
    args = options.parse_args()
    measure(run_of(args), args.tokens, args.mb_per_s, args.repeats).show()


def measure(run: Run, n_tokens: int, mb_per_s: Sequence[float], n_repeats: int) -> Result:
    """Add a row for each line to a store to the run's result."""
    prompts = [run.prompts.of_length(n_tokens, _SEED + n) for n in range(n_repeats)]
    with tempfile.TemporaryDirectory(prefix="kvpersist-shared-") as name:
        folder = Path(name)
        (folder / "weed").mkdir()
        bucket = Bucket(folder / "weed")
        try:
            os.environ.update(bucket.environment)
            bucket.wait()
            places = {"a folder": str(folder / "shared"), "S3": bucket.url}
            result: Result | None = None
            for place in places.values():
                with _server(run, place) as fleet:
                    setting = {"sides": fleet.flags, "prompt tokens": n_tokens}
                    about = "First tokens of prompts that another server has put."
                    result = result or run.result("shared", about, setting)
                    for prompt in prompts:
                        fleet.ask(SIDE, prompt, 1)
                    _wait_until_put(fleet)
            assert result is not None
            lines = [(place, UNTHROTTLED) for place in places] + [("S3", one) for one in mb_per_s]
            for place, rate in lines:
                bucket.link.bytes_per_s = rate * 1e6
                with _server(run, places[place]) as fleet:
                    row = {"store": place, "MB/s": None if rate == UNTHROTTLED else rate}
                    result.add({**row, **_pairs(fleet, prompts)})
        finally:
            bucket.close()
    return result


def _server(run: Run, place: str) -> Fleet:
    shared = "--kvpersist-shared", place, "--kvpersist-shared-key", "plain"
    return Fleet(run.model.path, [SIDE], shared)


def _wait_until_put(fleet: Fleet) -> None:
    fleet.settle(SIDE)

    def is_put() -> bool:
        stats = fleet.told(SIDE, "/v1/kvpersist/stats")
        return not stats["store"]["tiers"]["shared"]["waiting"]

    wait_until(is_put, "everything put", 600)


def _pairs(fleet: Fleet, prompts: Sequence[list[Message]]) -> dict[str, Any]:
    """Have each prompt computed, then answered with the store; return medians and ratios."""
    found: dict[str, list[tuple[float, float]]] = {"computed": [], "shared": []}
    reused = []
    for prompt in prompts:
        for what, its in found.items():
            fleet.settle(SIDE)  # the writer's work belongs to no other's time
            before = fleet.used(SIDE)
            headers = _NOT_KEPT if what == "computed" else {}
            reply = fleet.ask(SIDE, prompt, 1, headers=headers)
            cpu_s = cpu_between(before, fleet.used(SIDE)) or 0.0
            its.append((reply.ttft_s, cpu_s))
            print(f"{what}: {reply.ttft_s:.2f} s, CPU {cpu_s:.2f} s", file=sys.stderr, flush=True)
        reused.append(reply.cached_tokens)
    seconds = {what: [ttft_s for ttft_s, _ in its] for what, its in found.items()}
    ratios = [a / b for a, b in zip(seconds["shared"], seconds["computed"], strict=True)]
    return {
        **{f"{what} s": median(its) for what, its in seconds.items()},
        "shared / computed": median(ratios),
        "at most": max(ratios),
        **{f"{what} CPU s": median([cpu_s for _, cpu_s in its]) for what, its in found.items()},
        "reused": median(reused),
        "reused first": reused[0],
    }


if __name__ == "__main__":
    main()
