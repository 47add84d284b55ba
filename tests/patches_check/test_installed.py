"""Each check of the installed mlx-lm detects and names one kind of fault."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mlx_lm_kvpersist.cli.doctor import Finding
from mlx_lm_kvpersist.cli.selftest import check_patch
from mlx_lm_kvpersist.errors import KVPersistError, PatchNotEffective, SelfTestFailed
from mlx_lm_kvpersist.host.patching import versions
from mlx_lm_kvpersist.host.patching.patches import (
    PATCH_SET,
    PATCHES,
    Patch,
    PatchSet,
    Uses,
    look_up,
)
from patches_check import inventory
from patches_check.__main__ import main
from patches_check.conversation import Conversation
from patches_check.installed import Report, examine, print_report
from tests.support.host import REPOSITORY

OPTIONS = next(patch for patch in PATCHES if patch.name == "options")


def distribution(folder: Path, version: str) -> Path:
    """Make a folder that has only the metadata of this version of mlx-lm."""
    metadata = folder / f"mlx_lm-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Name: mlx-lm\nVersion: {version}\n", encoding="utf-8")
    return folder


def test_the_installed_mlx_lm_passes_all_checks(
    server: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["passed"], report["failures"], report["measured"]) == (True, [], True)
    assert [row["name"] for row in report["patches"]] == [
        f"patch {patch.name}" for patch in PATCHES
    ]
    assert all(row["passed"] for row in report["patches"])
    assert report["startup"]["passed"]
    kept = {row["name"]: row["said"] for row in report["cache_classes"]}
    assert kept["KVCache"] == "stored: full"
    assert kept["RotatingKVCache"] == "stored: sliding"
    assert kept["CacheList"] == "taken apart"
    bound = {row["name"]: row["said"] for row in report["bindings"]}
    assert bound["quantized_scaled_dot_product_attention"] == "replaced in every module"
    assert not PATCH_SET.is_applied


def changed(**fields: Any) -> Patch:
    return replace(OPTIONS, **fields)


def not_effective(server: ModuleType) -> None:
    raise PatchNotEffective("seen nothing")


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (changed(target="mlx_lm.server:no_such"), "no_such is missing in this mlx-lm"),
        (
            changed(expect=(Uses("main", "no_such"),)),
            "mlx_lm.server:main no longer uses no_such",
        ),
        (changed(verify=lambda server: None), "passes before the patch"),
        (changed(verify=not_effective), "has no effect: seen nothing"),
        (changed(replace=lambda stock: stock), "has no effect"),
    ],
    ids=["target", "use", "negative control", "probe", "replacement"],
)
def test_a_broken_patch_is_reported_with_its_fault(
    server: ModuleType, patch: Patch, message: str
) -> None:
    stock = look_up(server, "argparse")
    with pytest.raises(KVPersistError) as failed:
        check_patch(patch)
    assert message in str(failed.value)
    assert look_up(server, "argparse") is stock


def test_a_patch_that_is_not_undone_is_detected(
    server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = look_up(server, "argparse")
    try:
        with monkeypatch.context() as broken:
            broken.setattr(PatchSet, "undo", lambda self: None)
            with pytest.raises(SelfTestFailed, match=r"leaves .* replaced"):
                check_patch(OPTIONS)
    finally:
        vars(server)["argparse"] = stock


def test_a_broken_patch_fails_the_command(tmp_path: Path) -> None:
    """The exit status is 1, and the last line names the patch and the reason."""
    script = tmp_path / "broken.py"
    script.write_text(
        "import dataclasses, sys\n"
        "from mlx_lm_kvpersist.host.patching import patches\n"
        "broken = dataclasses.replace(patches.PATCHES[0], replace=lambda stock: stock)\n"
        "patches.PATCHES = (broken, *patches.PATCHES[1:])\n"
        "from patches_check import __main__, installed\n"
        "installed.check_startup = lambda *args: None\n"
        "installed.cache_classes = lambda: []\n"
        "installed.bindings = lambda patches: []\n"
        "sys.exit(__main__.main([]))\n",
        encoding="utf-8",
    )
    done = run(script, path=[REPOSITORY])
    assert done.returncode == 1, done.stderr
    assert (
        "patch options: patch options of mlx_lm.server:argparse has no effect: "
        in (done.stdout.splitlines()[-1])
    )


def run(*arguments: str | Path, path: list[Path]) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=variables,
        cwd=REPOSITORY,
        timeout=120,
    )


def test_an_mlx_lm_of_another_minor_version_fails_the_command(tmp_path: Path) -> None:
    path = [distribution(tmp_path, "0.33.0"), REPOSITORY]
    done = run("-m", "patches_check", path=path)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("mlx-lm 0.33.0, ") and "(not measured)" in lines[0]
    assert lines[-1] == (
        "mlx-lm: found mlx-lm 0.33.0, supported are 0.31.3 up to, not including, 0.33.0"
    )


def test_a_version_with_a_suffix_is_checked_and_not_measured(
    server: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    version = f"{versions.installed('mlx-lm')}+git"
    monkeypatch.syspath_prepend(str(distribution(tmp_path, version)))
    monkeypatch.setattr("patches_check.installed.check_startup", lambda *args: None)
    report = examine([OPTIONS])
    assert (report.mlx_lm, report.measured, report.failures) == (version, False, [])
    print_report(report)
    assert "(not measured)" in capsys.readouterr().out.splitlines()[0]


def test_unknown_cache_classes_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "class PagedKVCache(_BaseCache): ...\nclass Attention(nn.Module): ...\n"
    modules = {"mlx_lm.models.cache": ast.parse(source)}
    modules["mlx_lm.models.newest"] = ast.parse("class Ring(cache.KVCache): ...")
    monkeypatch.setattr(inventory, "_modules", lambda: modules)
    report = Report("0.32.2", "0.32.4", "3", "Linux", True, Finding("mlx-lm", True, ""))
    report.cache_classes = inventory.cache_classes()
    assert report.failures == [
        "PagedKVCache in mlx_lm.models.cache: unknown: decide how it is stored",
        "Ring in mlx_lm.models.newest: unknown: decide how it is stored",
    ]


def test_a_module_that_still_uses_stocks_function_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "quantized_scaled_dot_product_attention"
    modules = {"mlx_lm.models.newest": ast.parse(f"from .base import {name}")}
    modules["mlx_lm.chat"] = ast.parse("from .server import ModelProvider")
    monkeypatch.setattr(inventory, "_modules", lambda: modules)
    bindings = {binding.name: binding for binding in inventory.bindings(PATCHES)}
    assert not bindings[name].is_known
    message = "mlx_lm.models.newest would still use stock's; patch these modules, too"
    assert bindings[name].said == message
    assert bindings["ModelProvider"].said.endswith("other modules keep stock's")
    assert bindings["ModelProvider"].is_known


@pytest.mark.parametrize(
    ("cached", "tier", "same", "is_right"),
    [(9, "disk", True, True), (0, "", True, False), (9, "ram", True, False),
     (9, "disk", False, False)],
)  # fmt: skip
def test_a_conversation_must_come_from_disk_with_the_same_reply(
    cached: int, tier: str, same: bool, is_right: bool
) -> None:
    conversation = Conversation(10, 9, cached, tier, same)
    if is_right:
        conversation.check()
    else:
        with pytest.raises(Exception, match="expected tokens from disk"):
            conversation.check()


def test_a_narrow_terminal_does_not_truncate_the_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = "word " * 60 + "end"
    report = Report("0.32.2", "0.32.4", "3.11.7", "Linux", True, Finding("mlx-lm", True, ""))
    report.patches = [Finding("patch options", True, ""), Finding("patch run", False, error)]
    report.bindings = [inventory.Found("run", "mlx_lm.server", "replaced " * 20)]
    monkeypatch.setenv("COLUMNS", "50")
    for terminal in (True, False):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        print_report(report)
        out = capsys.readouterr().out
        assert "…" not in out
        assert out.count("replaced") == 20
        assert out.splitlines()[-1] == f"patch run: {error}"
        assert out.count("ok") == 1
