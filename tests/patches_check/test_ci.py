"""Every command of .ci/run and of the workflows exists in this repository."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.host import REPOSITORY

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
TARGETS = ("test", "patches", "own-tests", "facts")
"""The commands of .ci/run, in this order."""
PROGRAMS = {"test", "jq", "tee", "git", "sudo", "rm", "gh"}
"""Programs that a runner has."""
MOST_MINUTES = {"test-all": 350, "models": 120, "matrix": 90}
"""Time limits of jobs that may take more than an hour."""


def load_workflow(path: Path) -> dict[Any, Any]:
    content: dict[Any, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def targets() -> set[str]:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_workflows_are_docs_nightly_push_and_release() -> None:
    assert [path.name for path in WORKFLOWS] == [
        "docs.yml",
        "nightly.yml",
        "push.yml",
        "release.yml",
    ]


def commands_of(script: str) -> list[list[str]]:
    """Split a one-line script at pipes and semicolons; return the words of each command."""
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
    scripts = [step["run"] for step in steps(load_workflow(path)) if "run" in step]
    assert scripts
    for program, *arguments in (command for script in scripts for command in commands_of(script)):
        if program == "make":
            assert arguments[0] in targets()
        elif program == ".venv/bin/python":
            assert arguments[0] == "-m" and find_spec(arguments[1]) is not None
        elif program == ".venv/bin/uv":
            assert arguments[0] in ("tool", "version")
        elif program.startswith("."):
            assert program == ".ci/run" and (REPOSITORY / program).stat().st_mode & 0o100
        else:
            assert program in PROGRAMS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_job_has_a_time_limit_and_minimal_permissions(path: Path) -> None:
    """A job that may publish a package or write to the repository uses actions by their hashes."""
    workflow = load_workflow(path)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= MOST_MINUTES.get(name, 60), name
        used = [step["uses"] for step in job["steps"] if "uses" in step]
        rights = job.get("permissions", {})
        if name in ("publish", "notes"):
            assert rights in ({"id-token": "write"}, {"contents": "write"})
            assert used and all(re.search(r"@[0-9a-f]{40}$", action) for action in used), name
        else:
            pages = {"pages": "write", "id-token": "write"}
            assert rights == (pages if name == "deploy" else {}), name
            assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", action) for action in used), name
    for step in steps(workflow):
        assert ("uses" in step) != ("run" in step)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_superseded_runs_are_cancelled_except_releases(path: Path) -> None:
    assert ("concurrency" in load_workflow(path)) == (path.stem != "release")


def test_each_push_runs_the_same_commands_on_linux_and_on_a_mac() -> None:
    jobs = load_workflow(REPOSITORY / ".github/workflows/push.yml")["jobs"]
    systems = {entry["os"] for entry in jobs["test"]["strategy"]["matrix"]["include"]}
    for used in (systems, set(jobs["quick"]["strategy"]["matrix"]["os"])):
        assert {system.split("-")[0] for system in used} == {"ubuntu", "macos"}
    (run,) = [step for step in jobs["test"]["steps"] if "run" in step]
    assert (run["run"], "if" in run) == (".ci/run", False)


def test_the_nightly_run_tests_everything_with_upstreams_main_branch() -> None:
    workflow = load_workflow(REPOSITORY / ".github/workflows/nightly.yml")
    assert workflow[True]["schedule"]  # YAML 1.1 reads `on` as true
    (checkout,) = [step for step in steps(workflow) if "repository" in step.get("with", {})]
    assert checkout["with"]["repository"] == "ml-explore/mlx-lm"
    commands = " ".join(step.get("run", "") for step in steps(workflow))
    assert f"CHECKOUT={checkout['with']['path']}" in commands and "make test-all " in commands


def test_a_release_is_checked_built_and_published_without_a_token() -> None:
    """A manual run publishes nothing."""
    path = REPOSITORY / ".github/workflows/release.yml"
    jobs = load_workflow(path)["jobs"]
    commands = [step["run"] for step in jobs["build"]["steps"] if "run" in step]
    assert commands[0] == ".ci/run" and "make dist" in commands
    assert jobs["publish"]["if"] == "github.ref_type == 'tag'"
    assert (jobs["publish"]["needs"], jobs["notes"]["needs"]) == ("build", "publish")
    publisher = jobs["publish"]["steps"][-1]
    assert "pypi-publish" in publisher["uses"] and "with" not in publisher  # no password
    assert "secrets." not in path.read_text()


def test_ci_run_makes_all_targets_in_order(tmp_path: Path) -> None:
    """A script that prints its arguments replaces `make`."""
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
