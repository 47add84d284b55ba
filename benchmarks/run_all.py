"""First tokens, decoding, stalls and the store in one command, within a time.

    python -m benchmarks.run_all --preset cpu        # a tiny model, about 15 minutes on 2 cores
    python -m benchmarks.run_all --preset gpu --deadline 540 --out FOLDER

Every row is on disk as soon as it is known. Rows after the deadline are left out, and
the results say so. With `--page` RESULTS.md is made at the end; on a machine without matplotlib,
bring the results into benchmarks/results/DEVICE and run `python -m benchmarks.report`.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import decode, stall, store, ttft
from .models import DEFAULT_MODELS_DIR, find_model
from .report import FOLDER, Result, device_slug, write_page
from .runs import Deadline, Run
from .servers import DEFAULT_SIDES, SIDES


@dataclass(frozen=True)
class Step:
    """One piece of a preset; `least_s` is what it takes at the very least."""

    name: str
    measure: Callable[[Run, Path], Result]
    least_s: float = 10.0


def _ttft(name: str, contexts: Sequence[int], repeats: int) -> Step:
    return Step(name, lambda run, _: ttft.measure(run, contexts, repeats), 30.0)


def _decode(
    name: str, contexts: Sequence[int], batches: Sequence[int], repeats: int, tokens: int
) -> Step:
    return Step(name, lambda run, _: decode.measure(run, contexts, batches, repeats, tokens), 30.0)


def _stall(context: int, repeats: int) -> Step:
    return Step("stall", lambda run, _: stall.measure(run, context, repeats), 30.0)


def _store(model: str, n_tokens: int, repeats: int) -> Step:
    def measure(run: Run, models_dir: Path) -> Result:
        layout = store.layout_of(model, models_dir)
        return store.measure(layout, run.out, n_tokens, repeats, deadline=run.deadline)

    return Step("store", measure)


@dataclass(frozen=True)
class Preset:
    model: str
    steps: tuple[Step, ...]


PRESETS = {
    "cpu": Preset(
        "synthetic:tiny",
        (
            _ttft("ttft at 8K", (8192,), 2),
            _decode("decode of 8 at 4K", (4096,), (8,), 3, 64),
            _store("synthetic:llama-3.1-8b", 8192, 3),
            _ttft("ttft at 1K", (1024,), 3),
            _decode("decode of 1 to 8 at 1K", (1024,), (1, 2, 4, 8), 3, 64),
            _stall(4096, 2),
            _ttft("ttft at 4K", (4096,), 2),
            _decode("decode of 1 to 4 at 4K", (4096,), (1, 2, 4), 2, 64),
        ),
    ),
    "gpu": Preset(
        "synthetic:llama-3.1-8b",
        (
            _ttft("ttft at 8K and 32K", (8192, 32768), 2),
            _decode("decode of 8 at 4K", (4096,), (8,), 3, 128),
            _stall(16384, 2),
            _store("synthetic:llama-3.1-8b", 16384, 3),
            _ttft("ttft at 1K, 4K and 16K", (1024, 4096, 16384), 2),
            _decode("decode of 1 to 4 at 4K", (4096,), (1, 2, 4), 2, 128),
            _decode("decode of 1 to 8 at 1K and 16K", (1024, 16384), (1, 2, 4, 8), 2, 128),
        ),
    ),
    "smoke": Preset(
        "synthetic:tiny",
        (
            _ttft("ttft", (256,), 1),
            _decode("decode", (256,), (2,), 1, 16),
            _stall(512, 1),
            _store("synthetic:tiny", 1024, 1),
        ),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, required=True)
    parser.add_argument("--model", help="another model than the preset's")
    parser.add_argument("--models-dir", type=Path, default=DEFAULT_MODELS_DIR)
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--deadline", type=float, metavar="SECONDS")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(DEFAULT_SIDES))
    parser.add_argument("--only", nargs="+", metavar="WORD", help="steps that begin so")
    parser.add_argument("--page", action="store_true", help="make RESULTS.md at the end")
    args = parser.parse_args()
    preset = PRESETS[args.preset]
    deadline = Deadline(args.deadline)
    model = find_model(args.model or preset.model, args.models_dir)
    run = Run(model, args.out or FOLDER / device_slug(), tuple(args.sides), deadline)
    steps = [
        step
        for step in preset.steps
        if not args.only or any(step.name.startswith(word) for word in args.only)
    ]
    failed = run_steps(run, steps, args.models_dir)
    if args.page:
        write_page()
    return 1 if failed else 0


def run_steps(run: Run, steps: Sequence[Step], models_dir: Path) -> list[str]:
    """Run steps in order, as time allows; return the names of those that failed.

    One that fails takes none of the others with it.
    """
    failed = []
    for step in steps:
        if not run.deadline.allows(step.least_s):
            print(f"{step.name}: left out, {run.deadline.left_s:.0f} s left", flush=True)
            continue
        print(f"{step.name} …", file=sys.stderr, flush=True)
        started = time.monotonic()
        try:
            result = step.measure(run, models_dir)
        except Exception:
            traceback.print_exc()
            failed.append(step.name)
            continue
        print(f"{step.name}: {time.monotonic() - started:.0f} s", flush=True)
        result.show()
    return failed


if __name__ == "__main__":
    sys.exit(main())
