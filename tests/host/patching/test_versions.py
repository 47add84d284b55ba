"""Pairs of mlx-lm and mlx: measured pairs pass; pairs that hang or do not start are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_lm_kvpersist.errors import UnsupportedVersion
from mlx_lm_kvpersist.host.patching import versions


@pytest.fixture(autouse=True)
def linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")


@pytest.mark.parametrize(
    ("mlx_lm", "mlx"),
    [
        ("0.31.3", "0.31.2"),
        ("0.31.3", "0.32.4"),
        ("0.32.0", "0.31.2"),
        ("0.32.1", "0.32.0"),
        ("0.32.2", "0.32.2"),
        ("0.32.2", "0.32.4"),
    ],
)
def test_measured_pairs_are_known(mlx_lm: str, mlx: str) -> None:
    versions.check_pair(mlx_lm, mlx)
    assert versions.is_known(mlx_lm, mlx)


def test_installed_versions_are_known() -> None:
    assert versions.is_known(versions.installed("mlx-lm"), versions.installed("mlx"))


@pytest.mark.parametrize(
    ("mlx_lm", "mlx"),
    [("0.32.9", "0.32.4"), ("0.32.2", "0.33.1"), ("0.32.2", "0.32.5.dev20261101+abc")],
)
def test_pair_newer_than_measured_is_allowed_but_not_known(mlx_lm: str, mlx: str) -> None:
    versions.check_pair(mlx_lm, mlx)
    assert not versions.is_known(mlx_lm, mlx)


@pytest.mark.parametrize("suffix", [".dev1", "rc1", ".post1", "+g1234abc"])
def test_version_with_a_suffix_is_not_known(suffix: str) -> None:
    assert versions.is_known("0.32.0", "0.32.4")
    assert not versions.is_known(f"0.32.0{suffix}", "0.32.4")
    assert not versions.is_known("0.32.0", f"0.32.4{suffix}")


@pytest.mark.parametrize(
    ("direct_url", "measured"),
    [
        (None, True),
        ({"url": "https://example.org/x.git", "vcs_info": {"vcs": "git", "commit_id": "1"}}, False),
        ({"url": "file:///src/mlx-lm", "dir_info": {"editable": True}}, False),
    ],
)
def test_release_installed_from_git_or_a_folder_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct_url: object, measured: bool
) -> None:
    for name, version in (("mlx_lm", "0.32.0"), ("mlx", "0.32.4")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        if direct_url and name == "mlx_lm":
            (folder / "direct_url.json").write_text(json.dumps(direct_url))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert versions.installed("mlx-lm") == "0.32.0"
    assert versions.is_measured() is measured


@pytest.mark.parametrize("mlx_lm", ["0.31.2", "0.30.7", "0.33.0", "1.0"])
def test_mlx_lm_out_of_range_is_refused(mlx_lm: str) -> None:
    with pytest.raises(UnsupportedVersion) as caught:
        versions.check_pair(mlx_lm, "0.32.4")
    assert str(caught.value) == (
        f"found mlx-lm {mlx_lm}, supported are 0.31.3 up to, not including, 0.33.0; "
        "install one: pip install 'mlx-lm>=0.31.3,<0.33.0'"
    )


@pytest.mark.parametrize(
    ("mlx_lm", "mlx", "oldest"),
    [
        ("0.31.3", "0.31.1", "0.31.2"),
        ("0.32.0", "0.31.1", "0.31.2"),
        ("0.32.1", "0.31.2", "0.32.0"),
        ("0.32.2", "0.32.1", "0.32.2"),
        ("0.32.7", "0.32.1", "0.32.2"),
    ],
)
def test_an_mlx_too_old_for_its_mlx_lm_is_refused(mlx_lm: str, mlx: str, oldest: str) -> None:
    with pytest.raises(UnsupportedVersion, match=f"found mlx-lm {mlx_lm} with mlx {mlx}") as caught:
        versions.check_pair(mlx_lm, mlx)
    assert f"expected mlx {oldest} or newer" in str(caught.value)


@pytest.mark.parametrize("mlx", ["0.31.2", "0.32.0"])
def test_mlx_older_than_the_minimum_for_macs_is_refused_on_macs(
    mlx: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions.check_pair("0.32.0", mlx)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not versions.is_known("0.32.0", mlx)
    with pytest.raises(
        UnsupportedVersion, match=r"expected mlx 0\.32\.1 or newer: this mlx"
    ) as caught:
        versions.check_pair("0.32.0", mlx)
    assert str(caught.value).endswith("pip install 'mlx>=0.32.1'")
    versions.check_pair("0.32.0", "0.32.1")
    assert "mlx-lm 0.31.3 with mlx 0.32.1 to" in versions.found_and_known()


def test_pyproject_requires_the_same_minimum_mlx_on_macs() -> None:
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    floor = versions.text(versions.METAL_FLOOR)
    assert f"\"mlx>={floor}; sys_platform == 'darwin'\"" in project


@pytest.mark.parametrize(
    "start", ["host.install(['kvpersist'])", "main(['selftest'])"], ids=["server", "selftest"]
)
def test_old_mlx_lm_without_imported_names_is_refused_by_its_version(
    start: str,
) -> None:
    code = f"""
from importlib import import_module, metadata
from mlx_lm_kvpersist import host
from mlx_lm_kvpersist.cli.main import main
del import_module('mlx_lm.generate').GenerationBatch
installed = metadata.version
metadata.version = lambda name: "0.30.7" if name == "mlx-lm" else installed(name)
raise SystemExit({start})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "found mlx-lm 0.30.7, supported are 0.31.3 up to" in done.stderr.splitlines()[-1]
