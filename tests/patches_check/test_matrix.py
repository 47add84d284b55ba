"""The matrix: its rows, expected results, and a real run of two rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mlx_lm_kvpersist.host.patching import versions
from mlx_lm_kvpersist.host.patching.patches import PATCHES
from patches_check import matrix
from patches_check.__main__ import main
from patches_check.matrix import NEWEST, NEXT, Outcome, Row, RowFailed, rows

REFUSED = (
    "mlx_lm.server --plugin kvpersist: found mlx-lm 0.30.7, supported are 0.31.3 up to, not "
    "including, 0.33.0; install one: pip install 'mlx-lm>=0.31.3,<0.33.0'"
)


def test_rows_cover_both_ends_of_every_pair_and_refused_versions() -> None:
    serving = [(row.mlx_lm, row.mlx) for row in rows() if row.expect == "serves"]
    for pair in versions.PAIRS:
        mlx_lm, oldest = versions.text(pair.mlx_lm), versions.text(pair.oldest_mlx)
        assert {(mlx_lm, oldest), (mlx_lm, NEWEST)} <= set(serving)
    assert {row.mlx_lm for row in rows() if row.expect == "refused"} == {"0.30.7", "0.31.2"}
    assert [row.mlx_lm for row in rows() if row.expect == "reported"] == [NEXT]
    assert 10 <= len(rows()) <= 12


def test_rows_with_an_mlx_refused_on_macos_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere = rows()
    monkeypatch.setattr(matrix, "_IS_MAC", True)
    left_out = [(row.mlx_lm, row.mlx) for row in everywhere if row not in rows()]
    assert left_out == [("0.31.3", "0.31.2"), ("0.32.0", "0.31.2"), ("0.32.1", "0.32.0")]


def test_rows_of_mlx_lm_0_32_have_python_3_11_or_newer() -> None:
    for row in rows():
        if row.mlx_lm.startswith("0.32"):
            assert tuple(map(int, row.python.split("."))) >= (3, 11), row


@pytest.mark.parametrize(
    ("here", "version", "mlx", "python"),
    [
        ((3, 10), "0.32.2", "0.32.2", "3.11"),
        ((3, 13), "0.32.2", "0.32.2", "3.13"),
        ((3, 11), "0.31.3", "0.31.2", "3.11"),
    ],
)
def test_python_with_another_mlx_lm_uses_supported_python_and_mlx(
    here: tuple[int, int],
    version: str,
    mlx: str,
    python: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Row] = []

    def make(row: Row, *_: Path) -> Path:
        made.append(row)
        return Path(row.python)

    monkeypatch.setattr(sys, "version_info", (*here, 0, "final", 0))
    monkeypatch.setattr(matrix, "_IS_MAC", False)
    monkeypatch.setattr(versions, "installed", lambda name: "0.0.0")
    monkeypatch.setattr(matrix, "build_wheel", lambda folder: folder)
    monkeypatch.setattr(matrix, "make_environment", make)
    assert matrix.python_with(version, tmp_path) == Path(python)
    assert made == [Row(version, mlx, python, "serves")]


def test_the_matrix_is_printed_as_json_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--matrix", "print"]) == 0
    printed = json.loads(capsys.readouterr().out)
    row = {"mlx-lm": "0.31.3", "mlx": "0.31.2", "python": "3.10", "expect": "serves"}
    assert row in printed and len(printed) == len(rows())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[row]]\nmlx-lm = "1"\nmlx = "2"\npython = "3"', "row 1 of rows.toml has no 'expect'"),
        (
            '[[row]]\nmlx-lm = "1"\nmlx = "2"\npython = "3"\nexpect = "works"',
            "row 1 of rows.toml expects 'works', expected one of serves, refused, reported",
        ),
    ],
)
def test_an_invalid_row_is_refused_with_its_number(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        rows(path)


@pytest.mark.parametrize(
    ("row", "requirement"),
    [
        (Row("0.32.0", "0.31.2", "3.11", "serves"), "mlx-lm==0.32.0"),
        (Row(NEXT, NEWEST, "3.12", "reported"), "mlx-lm>=0.32.3.dev0"),
        (Row("checkout", NEWEST, "3.12", "reported", "/src/mlx-lm"), "mlx-lm @ file:///src/mlx-lm"),
    ],
)
def test_each_row_has_a_pip_requirement(row: Row, requirement: str) -> None:
    assert row.requirement == requirement


@pytest.mark.parametrize(
    ("expect", "result", "is_expected"),
    [
        ("serves", "serves", True),
        ("serves", "fails", False),
        ("serves", "refused", False),
        ("refused", "refused", True),
        ("refused", "serves", False),
        ("refused", "fails", False),
        ("reported", "fails", True),
        ("reported", "none", True),
    ],
)
def test_only_reported_rows_may_fail(expect: str, result: str, is_expected: bool) -> None:
    assert Outcome("1", "2", "3", expect, result).is_expected is is_expected


def outcome_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str) -> Outcome:
    """Check a row with this Python; `program` replaces the checks."""
    run = matrix._in_row

    def in_row(command: list[str | Path], folder: Path) -> object:
        return run([sys.executable, "-c", program], folder)

    monkeypatch.setattr(matrix, "make_environment", lambda *args: Path(sys.executable))
    monkeypatch.setattr(matrix, "_in_row", in_row)
    row = Row("0.32.2", NEWEST, "3.11", "serves")
    return matrix._check(row, tmp_path / "row", tmp_path / "wheel", keep=False)


def test_a_row_whose_checks_exit_early_fails_with_their_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outcome = outcome_of(monkeypatch, tmp_path, "raise SystemExit('no Metal here')")
    assert (outcome.result, outcome.is_expected) == ("fails", False)
    assert outcome.says == "the checks ended with status 1: no Metal here"


def test_a_row_with_a_broken_patch_fails_and_lists_failures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = {
        "mlx_lm": "0.32.2",
        "mlx": "0.32.4",
        "python": "3.11.7",
        "passed": False,
        "versions": {"passed": True},
        "patches": [{"passed": False}, {"passed": True}],
        "failures": ["patch run: no effect", "startup: no effect"],
        "conversation": None,
    }
    outcome = outcome_of(monkeypatch, tmp_path, f"print({json.dumps(report)!r})")
    assert (outcome.result, outcome.n_patches, outcome.mlx) == ("fails", 1, "0.32.4")
    assert outcome.says == "patch run: no effect | startup: no effect"
    assert matrix.line(outcome).startswith("FAIL mlx-lm 0.32.2, mlx 0.32.4, Python 3.11.7: fails")


@pytest.mark.parametrize(
    ("status", "last_line", "result"),
    [
        (1, REFUSED, "refused"),
        (0, REFUSED, "fails"),
        (1, "ImportError: no module", "fails"),
        (1, "", "fails"),
    ],
)
def test_only_a_failed_start_with_the_refusal_line_counts_as_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, last_line: str, result: str
) -> None:
    program = (
        f"import sys; print('noise', {last_line!r}, sep='\\n', file=sys.stderr); exit({status})"
    )
    run = matrix._in_row
    monkeypatch.setattr(
        matrix, "_in_row", lambda command, folder: run([sys.executable, "-c", program], folder)
    )
    expected = {"result": result, "says": last_line or "noise"}
    if not last_line:
        expected["says"] = "noise"
    assert matrix.refusal(Path(sys.executable), tmp_path) == expected


def test_a_failed_uv_command_raises_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RowFailed, match=r"uv no-such-command failed: .*no-such-command"):
        matrix.uv("no-such-command")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_real_rows_are_refused_and_served_as_expected(tmp_path: Path) -> None:
    """Needs PyPI, and the Pythons of these rows."""
    output = tmp_path / "found.json"
    assert main(["--matrix", "run", "--row", "1", "--row", "7", "--output", str(output)]) == 0
    refused, serves = json.loads(output.read_text())["rows"]
    assert (refused["result"], refused["says"]) == ("refused", REFUSED)
    assert (serves["result"], serves["n_patches"]) == ("serves", len(PATCHES))
    assert serves["cached_after_kill"] > serves["prompt_tokens"] // 2
