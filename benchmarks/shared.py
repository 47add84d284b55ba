"""The time to the first token of a prompt from a shared store, and of a computed prompt.

    python -m benchmarks.shared [--model FOLDER] [--tokens 4096] [--mb-per-s 50 5 1]

One server computes prompts and puts their blocks into a shared store. Then two servers with empty
disks answer each prompt, one after the other: `ours` has the shared store, and `computed` has no
shared store. The stores are a folder and an S3 server (SeaweedFS) on this machine, directly and
behind slower links. After a slow fetch the server skips the store for a while, so prompts behind a
slow link may be computed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from mlx_lm_kvpersist.api.admin import STATS_PATH
from mlx_lm_kvpersist.cache.blocks import BLOCK_TOKENS
from mlx_lm_kvpersist.store.records import SHARED
from tests.support import wait_until
from tests.support.bucket import Bucket
from tests.support.synthetic import Message

from .checks import SERVED, Expected, new
from .models import SMOLLM2
from .runs import Run, parser, run_of, show
from .servers import OURS, SIDES, BenchmarkServer, Fleet, Side, rotated

QUESTION = "shared"
COMPUTED = "computed"
_PUT_TIMEOUT_S = 600.0


def main() -> None:
    options = parser(__doc__, model=SMOLLM2, n_tokens=4096)
    options.add_argument("--mb-per-s", nargs="*", type=float, default=[50.0, 5.0, 1.0])
    args = options.parse_args()
    run = run_of(args, QUESTION)
    prompts = [run.prompts.of_length(args.tokens, 7_000_000 + n) for n in range(args.repeats)]
    with tempfile.TemporaryDirectory(prefix="kvpersist-shared-") as name:
        folder = Path(name)
        measure(run, "folder", str(folder / "shared"), prompts)
        (folder / "weed").mkdir()
        with closing(Bucket(folder / "weed")) as bucket:
            os.environ.update(bucket.environment)
            bucket.wait()
            measure(run, "S3", bucket.url, prompts)
            for rate in args.mb_per_s:
                bucket.link.bytes_per_s = rate * 1e6
                restore(run, f"S3, {rate:g} MB/s", bucket.url, prompts, SERVED)
    show(run, COMPUTED)


def measure(run: Run, store: str, url: str, prompts: Sequence[list[Message]]) -> None:
    """Let one server put prompts into the store, and measure them with another server.

    Raises WrongMeasurement unless the store has all blocks of all prompts.
    """
    with Fleet(run.model.path, [sharing(url)]) as fleet:
        for prompt in prompts:
            fleet[OURS].ask(prompt, 1, new())
        fleet[OURS].settle()
        wait_until(lambda: is_put(fleet[OURS]), "all blocks in the shared store", _PUT_TIMEOUT_S)
    n_tokens = min(run.prompts.count(prompt) for prompt in prompts)
    kinds = ("EXACT", "EXTEND", "DIVERGE")
    whole = Expected("read from the shared store", kinds, n_tokens - BLOCK_TOKENS, tier=SHARED)
    restore(run, store, url, prompts, whole)


def restore(
    run: Run, row: str, url: str, prompts: Sequence[list[Message]], expected: Expected
) -> None:
    """Measure the time to the first token, the CPU time, and the reused tokens."""
    expectations = {OURS: expected, COMPUTED: new()}
    computed = replace(SIDES[OURS], name=COMPUTED)
    with Fleet(run.model.path, [sharing(url), computed]) as fleet:
        for repeat, prompt in enumerate(prompts):
            for side in rotated(fleet.sides, repeat):
                before_s = fleet[side].cpu_s()
                reply = fleet[side].ask(prompt, 1, expectations[side])
                after_s = fleet[side].cpu_s()
                run.report.add(QUESTION, row, side, "s", reply.ttft_s)
                if before_s is not None and after_s is not None:
                    run.report.add(QUESTION, f"{row}, CPU time", side, "s", after_s - before_s)
                run.report.add(QUESTION, f"{row}, reused", side, "tokens", reply.cached_tokens)
                fleet[side].settle()  # so that no other sample includes the writer's work


def sharing(url: str) -> Side:
    """Return `ours` with an unencrypted shared store."""
    shared = ("--kvpersist-shared", url, "--kvpersist-shared-key", "plain")
    return replace(SIDES[OURS], flags=(*SIDES[OURS].flags, *shared))


def is_put(server: BenchmarkServer) -> bool:
    return not server.get(STATS_PATH)["store"]["tiers"]["shared"]["waiting"]


if __name__ == "__main__":
    main()
