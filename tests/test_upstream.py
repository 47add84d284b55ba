"""The reports in `upstream/` are short and complete, and their scripts show each fault."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.host import REPOSITORY

UPSTREAM = REPOSITORY / "upstream"
SEAM = UPSTREAM / "seam"
SCRIPTS = sorted(UPSTREAM.glob("*.py"))
needs_reported_version = pytest.mark.skipif(
    version("mlx-lm") != "0.32.2", reason="the reports are of 0.32.2"
)


def run(*command: str | Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python; `path` comes before the installed packages."""
    env = {**os.environ, "PYTHONPATH": str(path or "")}
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, check=False, env=env)


def test_each_script_has_a_report_and_at_most_30_lines() -> None:
    assert len(SCRIPTS) == 4
    listed = (UPSTREAM / "README.md").read_text(encoding="utf-8")
    for script in SCRIPTS:
        assert len(script.read_text(encoding="utf-8").splitlines()) <= 30, script
        assert "kvpersist" not in script.read_text(encoding="utf-8"), "stock alone"
        report = script.with_suffix(".md").read_text(encoding="utf-8")
        headings = re.findall(r"^\*\*([^*]+)\.\*\*", report, re.MULTILINE)
        assert {"Versions", "What happens", "Expected", "To see it", "Cause"} <= {*headings}, script
        assert "Suggested fix" in headings, script
        assert script.name in listed and script.with_suffix(".md").name in listed


@needs_reported_version
def test_a_draft_model_leaves_caches_one_token_short() -> None:
    done = run(UPSTREAM / "draft_cache.py")
    assert done.returncode == 0, done.stderr
    assert "4 tokens: without a draft +0, with a draft -1" in done.stdout


@needs_reported_version
def test_padding_changes_a_short_prompt_of_nemotron_h() -> None:
    done = run(UPSTREAM / "padded_prefill.py")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.rpartition(": ")[2]) > 0.01


@needs_reported_version
@pytest.mark.slow
def test_an_exact_cache_hit_ends_the_stock_server(smollm2: Path) -> None:
    done = run(UPSTREAM / "exact_hit.py", smollm2)
    assert "ValueError: Sequence 1 has an empty prompt" in done.stderr
    assert "another prompt: \"failed: <HTTPError 404: 'Not Found'>\"" in done.stdout


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs the program `patch`")
@needs_reported_version
def test_the_proposed_patch_applies_and_passes_its_tests(tmp_path: Path) -> None:
    spec = find_spec("mlx_lm")
    assert spec is not None and spec.origin is not None
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(spec.origin).parent, tmp_path / "mlx_lm", ignore=skipped)
    test = ("-m", "unittest", SEAM / "test_server_plugins.py")
    before = run(*test, path=tmp_path)
    assert before.returncode == 1 and "no attribute 'ServerPlugin'" in before.stderr
    command = ["patch", "-p1", "--input", str(SEAM / "server-plugins.patch")]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    after = run(*test, path=tmp_path)
    assert after.returncode == 0 and "Ran 4 tests" in after.stderr, after.stderr
