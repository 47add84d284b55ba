"""Measure all questions of RESULTS.md with one preset.

    python -m benchmarks.run_all --preset gpu-1 --out FOLDER

Presets are `smoke` (a tiny model, one or two minutes), `cpu`, and `gpu-1` to `gpu-6`, which may run
at the same time, each on its own GPUs. A preset writes one file into FOLDER, and saves each sample
at once. The run ends with an error if a server does not do the work that is measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import decode, stall, start, store, streams, together, ttft
from .models import DEFAULT_MODELS_DIR, SYNTHETIC, find_model
from .report import DeviceResults, Report, commit_of, compare, write_page
from .runs import BOTH, Run
from .servers import BEFORE, OURS, SIDES, before_side

STEPS: Mapping[str, Callable[..., None]] = {
    "start": start.measure,
    "ttft": ttft.measure,
    "decode": decode.measure,
    "together": together.measure,
    "stall": stall.measure,
    "streams": streams.measure,
    "store": store.measure,
}
TINY = f"{SYNTHETIC}tiny"


@dataclass(frozen=True)
class Step:
    """A benchmark and its arguments. `model`: replaces the preset's model."""

    name: str
    arguments: Mapping[str, Any]
    model: str | None = None


@dataclass(frozen=True)
class Preset:
    model: str
    steps: tuple[Step, ...]


def _step(name: str, model: str | None = None, **arguments: Any) -> Step:
    return Step(name, arguments, model)


_8B = f"{SYNTHETIC}llama-3.1-8b"
PRESETS = {
    "smoke": Preset(
        TINY,
        (
            _step("ttft", contexts={1024: 1}),
            _step("decode", batches={512: (1, 2)}, n_repeats=1, max_tokens=192),
            _step("together", system=512, agents_sides=BOTH, n_repeats=1),
            _step("stall", context=2048, n_repeats=1),
            _step("streams", n_streams=40, n_repeats=1),
            _step("start", n_repeats=1),
            _step("store", n_tokens=2048, n_repeats=1),
        ),
    ),
    "cpu": Preset(
        "smollm2-float32",
        (
            _step("start", n_repeats=3),
            # 8K tokens take four minutes. The model takes no longer prompts, so there is one turn.
            _step("ttft", contexts={8192: 1, 1024: 1, 4096: 1}, n_turns=1),
            _step("together", system=1024, agents_sides=(OURS,), n_repeats=3),
            _step("decode", batches={4096: (1, 2, 8)}, n_repeats=3, max_tokens=48),
            _step("stall", context=4096, n_repeats=3),
            _step("streams", model=TINY, n_streams=200, n_repeats=4),
            _step("store", n_tokens=8192, n_repeats=3),
        ),
    ),
    "gpu-1": Preset(
        _8B,
        (
            _step("ttft", contexts={8192: 6, 32768: 3}),
            # Each step starts new servers: one GPU may be too small for the stock caches of all
            # lengths.
            _step("ttft", contexts={1024: 2, 4096: 2, 16384: 2}),
            # Beside another server on an H200, stock ran out of memory for 64K.
            _step("ttft", contexts={65536: 1}, one_by_one=True),
        ),
    ),
    "gpu-2": Preset(
        _8B,
        (_step("decode", batches={4096: (1, 2, 8), 16384: (2,)}, n_repeats=3, max_tokens=128),),
    ),
    "gpu-3": Preset(
        _8B,
        (
            _step("together", system=2048, agents_sides=BOTH, n_repeats=5),
            _step("streams", n_streams=200, n_repeats=4),
        ),
    ),
    # Few repeats, because a first start compiles kernels for more than a minute.
    "gpu-4": Preset(_8B, (_step("start", n_repeats=2),)),
    "gpu-5": Preset(
        _8B,
        (_step("stall", context=16384, n_repeats=3), _step("store", n_tokens=8192, n_repeats=3)),
    ),
    "gpu-6": Preset(_8B, (_step("ttft", contexts={8192: 3, 32768: 1}, n_ranks=2),)),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, required=True)
    parser.add_argument("--only", nargs="+", choices=STEPS, help="run these steps only")
    parser.add_argument("--model", help="a folder, or a name on the hub (default: the preset's)")
    parser.add_argument("--models-dir", type=Path, default=DEFAULT_MODELS_DIR, metavar="FOLDER")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="(default: results/DEVICE)")
    parser.add_argument(
        "--before",
        type=Path,
        metavar="CHECKOUT",
        help="also measure the code of another checkout, and print the ratios of ours to before",
    )
    parser.add_argument("--page", action="store_true", help="write RESULTS.md at the end")
    args = parser.parse_args()
    report = measure(args.preset, args.model, args.models_dir, args.out, args.only, args.before)
    if args.before:
        print(compare(DeviceResults("", [report.content]), BEFORE))
    if args.page:
        write_page()


def measure(
    name: str,
    model: str | None = None,
    models_dir: Path = DEFAULT_MODELS_DIR,
    out: Path | None = None,
    only: list[str] | None = None,
    before: Path | None = None,
) -> Report:
    """Measure a preset, and return its report.

    before: a checkout that is measured in the same run, as the side `before`.
    """
    other = before_side(before) if before else None
    preset = PRESETS[name]
    main_model = find_model(model or preset.model, models_dir)
    flags = {side.name: " ".join(side.flags) for side in SIDES.values()}
    if other is not None:
        flags[BEFORE] = f"{' '.join(other.flags)} (commit {commit_of(other.checkout)})"
    report = Report(name, main_model.about(), flags, out)
    report.content["load of the machine before"] = os.getloadavg()[0]
    for step in preset.steps:
        if only and step.name not in only:
            continue
        began_s = time.monotonic()
        used = main_model if step.model is None else find_model(step.model, models_dir)
        STEPS[step.name](Run(used, report, other), **step.arguments)
        print(f"{step.name}: {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    print(f"saved in {report.path}", file=sys.stderr)
    return report


if __name__ == "__main__":
    main()
