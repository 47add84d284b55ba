"""The `selftest` command: its checks, its output, and no traces afterwards."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.cache.geometry.precision import Quantization
from mlx_lm_kvpersist.cache.live import packed as pk
from mlx_lm_kvpersist.cache.live.caches import FullPrecisionBatchKVCache
from mlx_lm_kvpersist.cli import selftest
from mlx_lm_kvpersist.cli.doctor import Finding, tried
from mlx_lm_kvpersist.cli.main import main as command
from mlx_lm_kvpersist.errors import SelfTestFailed
from mlx_lm_kvpersist.host.patching import versions
from mlx_lm_kvpersist.host.patching.patches import PATCHES
from tests.support.host import Environment


def test_all_checks_pass_and_leave_nothing_behind(
    server: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is written to the user's own store."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before, argv = _attributes_of(server), list(sys.argv)
    assert command(["selftest", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["works"] and all(finding["passed"] for finding in report["findings"])
    names = ["mlx-lm", *(f"patch {patch.name}" for patch in PATCHES), "startup", "round trip"]
    assert [finding["name"] for finding in report["findings"]] == names
    compared = report["findings"][-1]["found"]
    assert compared.startswith("k8rv4r, group auto: sequences that were batched")
    assert report["findings"][0]["found"].startswith(versions.installed("mlx-lm"))
    assert _attributes_of(server) == before and sys.argv == argv
    assert list(tmp_path.rglob("*kvpersist*")) == []


def _attributes_of(module: ModuleType) -> dict[str, Any]:
    """Return a module's attributes, except Python's record of the warnings shown there."""
    return {name: value for name, value in vars(module).items() if name != "__warningregistry__"}


def test_startup_check_reports_a_missing_plugin() -> None:
    finding = tried("startup", lambda: selftest.check_startup(["--plugin", "nothing"]))
    assert not finding.passed and finding.found.startswith("no plugin named 'nothing'")


def test_round_trip_uses_the_given_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the batch in full precision is found with 16 bits, and only then."""
    extract = FullPrecisionBatchKVCache.extract

    def other_row(self: FullPrecisionBatchKVCache, idx: int) -> Any:
        return extract(self, (idx + 1) % len(self._padding))

    monkeypatch.setattr(FullPrecisionBatchKVCache, "extract", other_row)
    selftest.check_numbers()
    with pytest.raises(SelfTestFailed):
        selftest.check_numbers(["--kvpersist-kv-bits", "16"])


def test_startup_check_reports_an_unknown_server_option(server: ModuleType) -> None:
    with pytest.raises(SelfTestFailed, match="unrecognized arguments: --no-such-option"):
        selftest.check_startup(["--no-such-option"])


def test_table_is_not_truncated_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "/a/long/path" * 12
    findings = [Finding("patch response_generator", False, f"{path} is missing")]
    monkeypatch.setattr(selftest, "run_selftest", lambda options: findings)
    monkeypatch.setenv("COLUMNS", "50")
    for terminal in (True, False):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        assert command(["selftest"]) == 1
        table, _, summary = capsys.readouterr().out.partition("mlx_lm.server --plugin")
        assert "…" not in table and table.count("/") == summary.count("/") == path.count("/")


@pytest.mark.parametrize("hook", ["init", "add_options", "configure"])
def test_an_error_in_a_plugins_hook_fails_the_startup_check(
    environment: Environment, hook: str
) -> None:
    selftest = ("python", "-m", "mlx_lm_kvpersist", "selftest", "--json")
    done = environment.run_forked(*selftest, "--", "--plugin", "failing", env={"FAIL_IN": hook})
    assert done.returncode == 1
    finding = json.loads(done.stdout)["findings"][-1]
    assert finding["name"] == "startup"
    assert finding["found"] == "RuntimeError: a fault of the plugin"


def test_selftest_configures_and_shuts_down_the_plugin(environment: Environment) -> None:
    record = environment.folder / "selftest.json"
    done = environment.run_forked(
        *("python", "-m", "mlx_lm_kvpersist", "selftest"),
        *("--", "--plugin", "echo", "--echo-file", record),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mlx_lm.server --plugin echo works here" in done.stdout
    calls = json.loads(record.read_text())
    assert calls == [["configure", ["echo"]], ["shutdown"]]


def test_machine_report_has_a_time_for_every_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At small sizes: attention is correct, and each call has a time and a size."""
    monkeypatch.setattr(selftest, "run_selftest", lambda options: [])
    monkeypatch.setattr(selftest, "HEADS", {80: 32})
    monkeypatch.setattr(selftest, "BITS", (4, 6))
    monkeypatch.setattr(selftest, "N_KEYS", 2048)
    assert command(["selftest", "--machine"]) == 0
    page = capsys.readouterr().out
    assert f"mlx {versions.installed('mlx')}" in page and "out of memory: " in page
    assert "ok    attention, heads of 80: right with (4, 6) bits; a prompt's 256 tokens " in page
    times = re.findall(r"(values folded|dequantize|16 bits|keys) \d[\d,.]* ms \d", page)
    assert len(times) == 2 * 4
    assert "ok    eight writes, each after a read: " in page


def test_attention_check_names_wrong_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    product = pk.matmul

    def wrong_for_six_bits(
        x: mx.array, packed: pk.Packed, quantization: Quantization, **options: Any
    ) -> mx.array:
        correct = product(x, packed, quantization, **options)
        return correct * 1.5 if quantization.bits == 6 else correct

    monkeypatch.setattr(pk, "matmul", wrong_for_six_bits)
    finding = tried("attention", lambda: selftest.attention(64))
    assert not finding.passed
    assert finding.found.startswith("wrong: packed, 6 bits, 2 heads; packed, 6 bits, 8 heads")
