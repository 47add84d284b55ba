"""Evaluate facts with several versions of mlx-lm; write the package's file, or compare it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

from mlx_lm_kvpersist.cache.geometry import spec
from mlx_lm_kvpersist.cache.geometry.spec import Architecture
from mlx_lm_kvpersist.host.patching import versions
from patches_check.matrix import REPOSITORY, RowFailed, python_with

from .configs import module_of
from .facts import TOLERANCE, Evaluated, combined

Facts = Mapping[str, Architecture]
"""The facts of each module of `mlx_lm.models`."""

_ABOUT = (
    "Facts about the architectures of mlx-lm, by module of mlx_lm.models.",
    "They are found by evaluating tiny models with each of these versions of mlx-lm.",
    "A fact is true if it is true for every model of the module. `older` has what differs.",
    "`python -m models_check --facts write` makes this file. Do not edit it by hand.",
)
_EVALUATION_S = 1800.0
_NEAR = 10
"""A difference within this factor of the tolerance is printed."""


def proven() -> list[str]:
    """Return the versions of mlx-lm for which the facts must be proven, the oldest first."""
    return [versions.text(pair.mlx_lm) for pair in versions.PAIRS]


def write(jobs: int, seed: int) -> list[str]:
    """Evaluate the zoo with every version; return a line for each failure."""
    by_version, failures = _evaluated(proven(), jobs, seed)
    if not failures:
        spec.FILE.write_text(written(by_version), encoding="utf-8")
        print(f"{spec.FILE} is written")
    return failures


def check(jobs: int, seed: int, *, every_version: bool) -> list[str]:
    """Compare the file with the oldest and newest version, or with all versions."""
    chosen = proven() if every_version else [proven()[0], proven()[-1]]
    by_version, failures = _evaluated(chosen, jobs, seed)
    if (in_file := sorted(spec.known())) != proven():
        failures.append(f"the file is for {', '.join(in_file)}, expected {', '.join(proven())}")
    return failures + differences(by_version)


def written(by_version: Mapping[str, Facts]) -> str:
    """Return the file's text, a line for each architecture.

    The newest version has all its facts, each older version only its differences.
    """
    *older, newest = sorted(by_version, key=versions.parse)
    entries = [
        f' "about": {json.dumps(_ABOUT, indent=2)}'.replace("\n]", "\n ]"),
        f' "newest": {json.dumps(newest)}',
        f' "architectures": {_rows(by_version[newest], 1)}',
    ]
    older_rows = [
        f"  {json.dumps(version)}: {_rows(_without(by_version[version], by_version[newest]), 2)}"
        for version in older
    ]
    entries.append(' "older": {\n' + ",\n".join(older_rows) + "\n }")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _without(facts: Facts, newest: Facts) -> Facts:
    return {module: fact for module, fact in facts.items() if newest.get(module) != fact}


def _rows(facts: Facts, n_spaces: int) -> str:
    rows = []
    for module, architecture in sorted(facts.items()):
        values = {name: value for name, value in asdict(architecture).items() if value != ""}
        rows.append(f"\n{' ' * n_spaces} {json.dumps(module)}: {json.dumps(values)}")
    return "{" + ",".join(rows) + f"\n{' ' * n_spaces}}}"


def differences(by_version: Mapping[str, Facts]) -> list[str]:
    lines = []
    for version, facts in by_version.items():
        shipped = spec.known().get(version, {})
        for module in sorted(facts.keys() | shipped.keys()):
            # The file also has modules of later versions; this version has no such models.
            if module in facts or version == proven()[-1]:
                shown, in_file = facts.get(module), shipped.get(module)
                if shown != in_file:
                    lines.append(f"mlx-lm {version}: {module} is {shown}, the file has {in_file}")
    return lines


def _evaluated(chosen: Sequence[str], jobs: int, seed: int) -> tuple[dict[str, Facts], list[str]]:
    by_version: dict[str, Facts] = {}
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="facts-") as folder:
        for version in chosen:
            start = time.monotonic()
            try:
                python = python_with(version, Path(folder) / version)
                by_version[version] = facts_with(python, jobs, seed)
            except RowFailed as error:
                failures.append(f"mlx-lm {version}: {error}")
            result = f"{len(by_version[version])} modules" if version in by_version else "no result"
            print(f"mlx-lm {version}: {result} ({time.monotonic() - start:.0f} s)", flush=True)
    return by_version, failures


def facts_with(python: Path, jobs: int, seed: int) -> Facts:
    """Return the facts by module, for the mlx-lm of a Python environment. Raises RowFailed."""
    with ThreadPoolExecutor(jobs) as pool:
        lines = [
            line
            for output in pool.map(partial(_part, python, jobs, seed), range(jobs))
            for line in output
        ]
    by_module: dict[str, list[Evaluated]] = {}
    for name, values in map(json.loads, lines):
        by_module.setdefault(module_of(name), []).append(Evaluated(**values))
        for what, difference in values["differences"].items():
            if TOLERANCE / _NEAR < difference < TOLERANCE * _NEAR:
                print(f"{name}: {what}: {difference:.1e}, near the tolerance of {TOLERANCE:g}")
    return {module: combined(several) for module, several in by_module.items()}


def _part(python: Path, jobs: int, seed: int, number: int) -> list[str]:
    command = [python, "-m", "models_check.evaluate", number, jobs, seed]
    try:
        done = subprocess.run(
            [*map(str, command)],
            capture_output=True,
            text=True,
            check=False,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"},
            timeout=_EVALUATION_S,
        )
    except subprocess.TimeoutExpired:
        raise RowFailed(f"the evaluation did not end within {_EVALUATION_S:.0f} s") from None
    lines = done.stdout.splitlines()
    if done.returncode:
        last = json.loads(lines[-1])[0] if lines else "no name"
        raise RowFailed(
            f"the evaluation ended with status {done.returncode} after {last}: "
            f"{done.stderr[-2000:]}"
        )
    return lines
