"""CI runs what can be run here: every command of .ci/run and of the workflows exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.host import REPOSITORY

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
TARGETS = ("test", "patches", "own-tests", "facts")
"""Of .ci/run, in this order."""
PROGRAMS = {"test", "jq", "tee"}
"""Those that a runner has."""


def loaded(path: Path) -> dict[Any, Any]:
    content: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def targets() -> set[str]:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_the_workflows_are_these() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "release.yml", "weekly.yml"]


def commands_of(script: str) -> list[list[str]]:
    """Return the commands of a script of one line, as words, pipes taken apart."""
    lexer = shlex.shlex(script, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("|&;"):
            commands.append([])
        else:
            commands[-1].append(word)
    return commands


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_command_of_a_workflow_exists(path: Path) -> None:
    scripts = [step["run"] for step in steps(loaded(path)) if "run" in step]
    assert scripts
    for program, *arguments in (one for script in scripts for one in commands_of(script)):
        if program == "make":
            assert arguments[0] in targets()
        elif program.startswith("."):
            assert program == ".ci/run" and (REPOSITORY / program).stat().st_mode & 0o100
        else:
            assert program in PROGRAMS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_job_ends_and_has_few_rights(path: Path) -> None:
    workflow = loaded(path)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 60, name
        assert job.get("permissions", {}) in ({}, {"id-token": "write"})
    for step in steps(workflow):
        assert ("uses" in step) != ("run" in step)
        assert "uses" not in step or re.fullmatch(r"[\w./-]+@[\w./-]+", step["uses"])


def test_ci_runs_the_same_commands_on_linux_and_on_a_mac() -> None:
    jobs = loaded(REPOSITORY / ".github/workflows/ci.yml")["jobs"]
    systems = {each["os"] for each in jobs["checks"]["strategy"]["matrix"]["include"]}
    for found in (systems, set(jobs["matrix"]["strategy"]["matrix"]["os"])):
        assert {one.split("-")[0] for one in found} == {"ubuntu", "macos"}
    run, soak = [step for step in jobs["checks"]["steps"] if "run" in step]
    assert (run["run"], "if" in run) == (".ci/run", False)
    assert soak["if"] == "runner.os == 'macOS'" and soak["run"].startswith("make soak ")


def test_the_weekly_run_takes_upstreams_main_branch() -> None:
    workflow = loaded(REPOSITORY / ".github/workflows/weekly.yml")
    assert workflow[True]["schedule"]  # YAML 1.1 reads `on` as true
    (checkout,) = [step for step in steps(workflow) if "repository" in step.get("with", {})]
    assert checkout["with"]["repository"] == "ml-explore/mlx-lm"
    commands = " ".join(step.get("run", "") for step in steps(workflow))
    assert f"CHECKOUT={checkout['with']['path']}" in commands


def test_a_release_is_checked_built_and_published_without_a_token() -> None:
    workflow = loaded(REPOSITORY / ".github/workflows/release.yml")
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    commands = [step["run"] for step in build["steps"] if "run" in step]
    assert commands[0] == ".ci/run" and commands[-1] == "make dist"
    assert publish["needs"] == "build" and publish["permissions"] == {"id-token": "write"}
    (publisher,) = [step for step in publish["steps"] if "pypi-publish" in step["uses"]]
    assert "with" not in publisher  # no password
    assert "secrets." not in (REPOSITORY / ".github/workflows/release.yml").read_text()


def test_ci_run_makes_the_tests_and_the_checks_of_patches(tmp_path: Path) -> None:
    """With a `make` that only says what it is asked for."""
    (tmp_path / "make").write_text('#!/bin/sh\necho "make $*"\n', encoding="utf-8")
    (tmp_path / "make").chmod(0o755)
    done = subprocess.run(
        [REPOSITORY / ".ci" / "run"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": sys.executable},
    )
    assert done.stdout.splitlines() == [
        f"make {target} PYTHON={sys.executable}" for target in TARGETS
    ]
    assert targets() >= {*TARGETS}
