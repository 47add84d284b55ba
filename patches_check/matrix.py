"""The matrix: an environment for each row of `versions.toml`, and its result."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlx_lm_kvpersist.cli.output import console, table
from mlx_lm_kvpersist.host.patching import versions

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parent.parent
ROWS = Path(__file__).with_name("versions.toml")
EXPECTATIONS = ("serves", "refused", "reported")
NEWEST, NEXT = "newest", "next"
ROW_S = 1800.0
"""The time limit of a row: its downloads, its checks and its servers."""
_IS_MAC = sys.platform == "darwin"
_OWN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class RowFailed(Exception):
    """A row could not be checked; the message says why."""


@dataclass(frozen=True)
class Row:
    """Versions to install together, and the expected result."""

    mlx_lm: str
    mlx: str
    python: str
    expect: str
    checkout: str = ""
    """A folder to install mlx-lm from, instead of a version."""

    def to_json(self) -> dict[str, str]:
        """Return the row for CI services, with the names of `versions.toml`."""
        row = {"mlx-lm": self.mlx_lm, "mlx": self.mlx}
        return {**row, "python": self.python, "expect": self.expect}

    @property
    def requirement(self) -> str:
        if self.checkout:
            return f"mlx-lm @ {Path(self.checkout).resolve().as_uri()}"
        if self.mlx_lm == NEXT:
            major, minor, patch = map(int, newest_serving().split("."))
            return f"mlx-lm>={major}.{minor}.{patch + 1}.dev0"
        return f"mlx-lm=={self.mlx_lm}"


@dataclass(frozen=True)
class Outcome:
    """The result of a row, with the versions that were installed."""

    mlx_lm: str
    mlx: str
    python: str
    expect: str
    result: str
    """"serves", "refused", "fails", or "none" if there is no such version."""
    says: str = ""
    """Why the row does not serve: the server's message, the failed checks or the error."""
    n_patches: int = 0
    prompt_tokens: int = 0
    cached_after_kill: int = 0
    seconds: float = 0.0

    @property
    def is_expected(self) -> bool:
        return self.expect in (self.result, "reported")


def rows(path: Path = ROWS) -> list[Row]:
    """On a Mac, leave out rows that serve elsewhere but whose mlx is too old there.

    Raises ValueError for an invalid row.
    """
    found = []
    for number, row in enumerate(tomllib.loads(path.read_text(encoding="utf-8"))["row"], 1):
        try:
            found.append(Row(row["mlx-lm"], row["mlx"], row["python"], row["expect"]))
        except KeyError as missing:
            raise ValueError(f"row {number} of {path.name} has no {missing}") from None
        if found[-1].expect not in EXPECTATIONS:
            raise ValueError(
                f"row {number} of {path.name} expects {found[-1].expect!r}, expected one of "
                f"{', '.join(EXPECTATIONS)}"
            )
    if _IS_MAC:
        found = [row for row in found if row.expect != "serves" or not _is_too_old(row.mlx)]
    return found


def _is_too_old(mlx: str) -> bool:
    return mlx != NEWEST and versions.parse(mlx) < versions.METAL_FLOOR


def newest_serving() -> str:
    serving = [row.mlx_lm for row in rows() if row.expect == "serves"]
    return max(serving, key=lambda version: [*map(int, version.split("."))])


def run(
    numbers: Sequence[int] | None = None, checkout: Path | None = None, folder: Path | None = None
) -> list[Outcome]:
    """`numbers` selects rows, counted from 1 (default: all).

    A `checkout` of mlx-lm is one more row. Environments in `folder` are kept for inspection.
    """
    chosen = [row for n, row in enumerate(rows(), 1) if not numbers or n in numbers]
    if checkout is not None:
        chosen.append(Row("checkout", NEWEST, "3.12", "reported", str(checkout)))
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="patches-check-") as temporary:
        place = folder or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        wheel = build_wheel(place)
        for number, row in enumerate(chosen, 1):
            start = time.monotonic()
            outcome = _check(row, place / f"row-{number}", wheel, keep=folder is not None)
            outcomes.append(outcome)
            seconds = time.monotonic() - start
            print(f"{line(outcome)} ({seconds:.0f} s)", file=sys.stderr, flush=True)
    return outcomes


def build_wheel(folder: Path) -> Path:
    """Build this checkout's wheel, because users install a wheel."""
    uv("build", "--quiet", "--wheel", "--out-dir", folder / "wheel", REPOSITORY)
    return max((folder / "wheel").glob("*.whl"), key=lambda path: path.stat().st_mtime)


def _check(row: Row, folder: Path, wheel: Path, *, keep: bool) -> Outcome:
    start = time.monotonic()
    found: dict[str, Any] = {
        "mlx_lm": row.mlx_lm,
        "mlx": row.mlx,
        "python": row.python,
        "expect": row.expect,
    }
    try:
        python = make_environment(row, folder, wheel)
        if python is None:
            return Outcome(**found, result="none", says=f"PyPI has no {row.requirement}")
        if row.expect == "refused":  # the environment may lack modules that the checks import
            return Outcome(**found, **refusal(python, folder))
        report = _report(python)
        found |= {name: report[name] for name in ("mlx_lm", "mlx", "python")}
        if row.checkout:
            found["mlx_lm"] += f" of {commit(Path(row.checkout))}"
        if not report["versions"]["passed"]:
            return Outcome(**found, **refusal(python, folder))
        talk = report["conversation"] or {}
        return Outcome(
            **found,
            result="serves" if report["passed"] else "fails",
            says=" | ".join(report["failures"]),
            n_patches=sum(one["passed"] for one in report["patches"]),
            prompt_tokens=talk.get("prompt_tokens", 0),
            cached_after_kill=talk.get("cached_after", 0),
            seconds=round(time.monotonic() - start, 1),
        )
    except RowFailed as error:
        return Outcome(**found, result="fails", says=str(error))
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def make_environment(row: Row, folder: Path, wheel: Path) -> Path | None:
    """Make a row's environment with the wheel; return its Python, or None without such an mlx-lm.

    Rows that serve are installed within the package's bounds. Other rows override the bounds,
    because they try versions outside of them.
    """
    uv("venv", "--quiet", "--clear", "--python", row.python, folder)
    python = folder / "bin" / "python"
    mlx = "mlx" if _IS_MAC else "mlx[cpu]"
    mlx += f"=={row.mlx}" if row.mlx != NEWEST else ""
    command: list[str | Path] = [
        "pip",
        "install",
        "--quiet",
        "--python",
        python,
        wheel,
        row.requirement,
        mlx,
    ]
    if row.expect != "serves":
        overrides = folder / "overrides.txt"
        overrides.write_text(f"{row.requirement}\n{mlx}\n", encoding="utf-8")
        command += ["--overrides", overrides]
    try:
        uv(*command)
    except RowFailed as error:
        if row.mlx_lm == NEXT and "only mlx-lm<" in str(error):
            return None
        raise
    return python


def python_with(version: str, folder: Path) -> Path:
    """Return this Python if it has the version of mlx-lm, otherwise a new environment's.

    The environment follows the first row of `versions.toml` that serves with that mlx-lm, so its
    mlx is old. It has the Python version of this process or of the row, whichever is newer. Raises
    RowFailed if the environment cannot be made.
    """
    if version == versions.installed("mlx-lm"):
        return Path(sys.executable)
    row = next(row for row in rows() if (row.mlx_lm, row.expect) == (version, "serves"))
    here = ".".join(map(str, sys.version_info[:2]))
    newer = max(here, row.python, key=lambda python: [*map(int, python.split("."))])
    row = replace(row, python=newer)
    python = make_environment(row, folder / "environment", build_wheel(folder))
    assert python is not None
    return python


def _report(python: Path) -> dict[str, Any]:
    done = _in_row([python, "-m", "patches_check", "--json", "--conversation"], REPOSITORY)
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise RowFailed(f"the checks ended with status {done.returncode}: {_end(done)}") from None
    return report


def refusal(python: Path, folder: Path) -> dict[str, Any]:
    """Start the server as users do. Return whether it was refused, and its message."""
    command: list[str | Path] = [python, "-m", "mlx_lm", "server", "--plugin", "kvpersist"]
    done = _in_row([*command, "--model", folder], folder)
    said = done.stderr.strip().splitlines()[-1:] or ["nothing"]
    is_refused = done.returncode == 1 and "supported are" in said[0]
    return {"result": "refused" if is_refused else "fails", "says": said[0]}


def commit(checkout: Path) -> str:
    done = _in_row(["git", "rev-parse", "--short=10", "HEAD"], checkout)
    return f"git {done.stdout.strip()}" if done.returncode == 0 else "a folder"


def uv(*command: str | Path) -> None:
    """Raises RowFailed with uv's output."""
    program = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")
    program = program or shutil.which("uv")
    if program is None:
        raise RowFailed("uv is needed to make environments: pip install uv")
    done = _in_row([program, *command], REPOSITORY)
    if done.returncode:
        raise RowFailed(f"uv {command[0]} failed: {_end(done)}")


def _in_row(command: Sequence[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [*map(str, command)],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            env=_environment(os.environ),
            timeout=ROW_S,
        )
    except subprocess.TimeoutExpired:
        raise RowFailed(f"{Path(command[0]).name} did not end within {ROW_S:.0f} s") from None


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those by which a row's process finds this environment."""
    return {name: value for name, value in variables.items() if name not in _OWN_VARIABLES}


def _end(done: subprocess.CompletedProcess[str], n_lines: int = 8) -> str:
    return " ".join(" ".join((done.stderr or done.stdout).split("\n")[-n_lines:]).split())


def line(outcome: Outcome) -> str:
    mark = "ok  " if outcome.is_expected else "FAIL"
    says = f": {outcome.says}" if outcome.says else ""
    return (
        f"{mark} mlx-lm {outcome.mlx_lm}, mlx {outcome.mlx}, Python {outcome.python}: "
        f"{outcome.result}, expected {outcome.expect}{says}"
    )


def print_outcomes(outcomes: Sequence[Outcome]) -> None:
    columns = ["mlx-lm", "mlx", "python", "expected", "result", "patches", "reused after kill -9"]
    rows = [
        [
            *(one.mlx_lm, one.mlx, one.python, one.expect, one.result),
            str(one.n_patches or "-"),
            f"{one.cached_after_kill:,} of {one.prompt_tokens:,}" if one.prompt_tokens else "-",
        ]
        for one in outcomes
    ]
    console().print(table(columns, rows, right="patches"))
    for one in outcomes:
        if one.says:
            console().print(line(one))
