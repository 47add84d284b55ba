"""The facts that ship in the package: evaluated with every version of mlx-lm, written, compared."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial, reduce
from pathlib import Path

from mlx_lm_kvpersist.cache.geometry import architectures
from mlx_lm_kvpersist.cache.geometry.architectures import Architecture
from mlx_lm_kvpersist.host.patching import versions
from patches_check.matrix import REPOSITORY, RowFailed, python_with

from .configs import module_of
from .facts import TOLERANCE, Evaluated, combined

Facts = Mapping[str, Architecture]
"""By module of `mlx_lm.models`."""

_ABOUT = (
    "Facts about the architectures of mlx-lm, by module of mlx_lm.models.",
    "They are found by evaluating tiny models, and proven for the versions of mlx-lm in `mlx_lm`.",
    "A fact is true if it is true for every model of the module in each of these versions.",
    "`python -m models_check --facts write` makes this file. Do not edit it by hand.",
)
_EVALUATION_S = 1800.0
_NEAR = 10
"""A difference within this factor of the tolerance is reported: it could come out otherwise."""


def proven() -> list[str]:
    """Return the versions of mlx-lm that the facts must be proven for, the oldest first."""
    return [versions.text(pair.mlx_lm) for pair in versions.PAIRS]


def write(jobs: int, seed: int) -> list[str]:
    """Evaluate every version and write the file; return what went wrong, a line each."""
    found, failures = _evaluated(proven(), jobs, seed)
    if not failures:
        architectures.FILE.write_text(written(over_all(found)), encoding="utf-8")
        print(f"{architectures.FILE.relative_to(REPOSITORY)} is written")
    return failures


def check(jobs: int, seed: int, *, every_version: bool) -> list[str]:
    """Compare the file with the oldest and the newest version, or with all; return differences."""
    chosen = proven() if every_version else [proven()[0], proven()[-1]]
    found, failures = _evaluated(chosen, jobs, seed)
    in_file, shipped = architectures.known()
    if list(in_file) != proven():
        failures.append(f"the file is for {', '.join(in_file)}, expected {', '.join(proven())}")
    return failures + differences(shipped, found)


def over_all(found: Mapping[str, Facts]) -> Facts:
    """Return what holds in each of several versions that have a module."""
    modules = sorted({module for facts in found.values() for module in facts})
    return {
        module: reduce(_both, (facts[module] for facts in found.values() if module in facts))
        for module in modules
    }


def _both(one: Architecture, other: Architecture) -> Architecture:
    return Architecture(
        one.batches and other.batches,
        one.joins and other.joins,
        one.packed and other.packed,
        one.refused or other.refused,
    )


def written(facts: Facts) -> str:
    """Return the file's text: one line for each architecture."""
    rows = []
    for module, its in sorted(facts.items()):
        values = {name: value for name, value in asdict(its).items() if value != ""}
        rows.append(f"  {json.dumps(module)}: {json.dumps(values)}")
    about = json.dumps(_ABOUT, indent=1).replace("\n", "\n ")
    return (
        f'{{\n "about": {about},\n "mlx_lm": {json.dumps(proven())},\n'
        ' "architectures": {\n' + ",\n".join(rows) + "\n }\n}\n"
    )


def differences(shipped: Facts, found: Mapping[str, Facts]) -> list[str]:
    """Return how the shipped facts differ from those found in each version, a line each.

    The file may say less than one version shows, but not less than all of them show.
    """
    lines = []
    for version, facts in found.items():
        for module, its in facts.items():
            claimed = shipped.get(module)
            if claimed is None:
                lines.append(f"mlx-lm {version}: {module} is not in the file")
            elif _both(claimed, its) != claimed:
                lines.append(f"mlx-lm {version}: {module} is {its}, the file has {claimed}")
    if not lines and list(found) == proven():
        expected = over_all(found)
        lines += [
            f"{module} is {expected.get(module)} in every version, the file has {claimed}"
            for module, claimed in shipped.items()
            if expected.get(module) != claimed
        ]
    return lines


def _evaluated(chosen: Sequence[str], jobs: int, seed: int) -> tuple[dict[str, Facts], list[str]]:
    """Evaluate the zoo with each version, and tell of each; return facts and failures."""
    found: dict[str, Facts] = {}
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="facts-") as folder:
        for version in chosen:
            start = time.monotonic()
            try:
                python = python_with(version, Path(folder) / version)
                found[version] = facts_with(python, jobs, seed)
            except RowFailed as error:
                failures.append(f"mlx-lm {version}: {error}")
            else:
                seconds = time.monotonic() - start
                print(f"mlx-lm {version}: {len(found[version])} modules ({seconds:.0f} s)")
    return found, failures


def facts_with(python: Path, jobs: int, seed: int) -> Facts:
    """Return the facts that a Python's mlx-lm shows, by module. Raises RowFailed."""
    with ThreadPoolExecutor(jobs) as pool:
        lines = [
            line
            for part in pool.map(partial(_part, python, jobs, seed), range(jobs))
            for line in part
        ]
    by_module: dict[str, list[Evaluated]] = {}
    for name, its in map(json.loads, lines):
        by_module.setdefault(module_of(name), []).append(Evaluated(**its))
        for what, difference in its["differences"].items():
            if TOLERANCE / _NEAR < difference < TOLERANCE * _NEAR:
                print(f"{name}: {what}: {difference:.1e}, near the tolerance of {TOLERANCE:g}")
    return {module: combined(several) for module, several in by_module.items()}


def _part(python: Path, jobs: int, seed: int, part: int) -> list[str]:
    command = [python, "-m", "models_check.evaluate", part, jobs, seed]
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
        raise RowFailed(f"its facts are not known after {_EVALUATION_S:.0f} s") from None
    lines = done.stdout.splitlines()
    if done.returncode:
        last = json.loads(lines[-1])[0] if lines else "no name"
        raise RowFailed(
            f"the evaluation ended with status {done.returncode} after {last}: "
            f"{done.stderr[-2000:]}"
        )
    return lines
