"""The file of facts is complete, in the written form, and compared with the versions' facts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from mlx_lm_kvpersist.cache.geometry import spec
from mlx_lm_kvpersist.cache.geometry.spec import FILE, Architecture, known
from models_check import facts_file
from models_check.__main__ import main
from models_check.configs import CONFIGS, module_of
from models_check.facts_file import differences, proven, written

TRUE = Architecture(True, True, True)
ALONE = Architecture(False, False, True)
OLDEST, SECOND, *_, NEWEST = proven()


def test_the_file_is_as_it_is_written() -> None:
    """Sorted, one line for each architecture, for the versions that serve."""
    assert FILE.read_text(encoding="utf-8") == written(known())
    assert sorted(known()) == proven()
    assert list(known()[NEWEST]) == sorted(known()[NEWEST])


def test_every_architecture_of_the_zoo_is_in_the_file() -> None:
    assert known()[NEWEST].keys() == {module_of(name) for name in CONFIGS}


@pytest.mark.parametrize("version", proven())
def test_prompts_are_computed_together_only_where_replies_are(version: str) -> None:
    assert [name for name, its in known()[version].items() if its.joins and not its.batches] == []


def test_older_versions_have_their_own_facts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused = Architecture(False, False, False, "why")
    found = {
        OLDEST: {"a": ALONE, "gone": TRUE},
        SECOND: {"a": TRUE, "b": refused},
        NEWEST: {"a": TRUE, "b": TRUE},
    }
    monkeypatch.setattr(spec, "FILE", tmp_path / "architectures.json")
    spec.FILE.write_text(written(found), encoding="utf-8")
    known.cache_clear()
    try:
        shipped = known()
    finally:
        known.cache_clear()
    assert shipped == {**found, OLDEST: {"a": ALONE, "b": TRUE, "gone": TRUE}}


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Architecture]]:
    """The facts of each version, at first those of the file. No version is installed."""
    found = {version: dict(known()[version]) for version in proven()}

    def evaluated(
        chosen: Sequence[str], jobs: int, seed: int
    ) -> tuple[dict[str, dict[str, Architecture]], list[str]]:
        return {version: found[version] for version in chosen}, []

    monkeypatch.setattr(facts_file, "_evaluated", evaluated)
    return found


def test_a_check_fails_on_a_difference_and_names_it(
    shown: dict[str, dict[str, Architecture]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--facts", "check"]) == 0
    shown[SECOND] = {**shown[SECOND], "llama": ALONE}
    assert main(["--facts", "check"]) == 0  # the oldest and the newest version
    assert main(["--facts", "check", "--every-version"]) == 1
    said = capsys.readouterr().out
    assert f"mlx-lm {SECOND}: llama is Architecture(batches=False" in said
    assert "--facts write" in said


def test_a_check_fails_on_a_module_that_is_new_or_gone(
    shown: dict[str, dict[str, Architecture]],
) -> None:
    shown[NEWEST] = {**shown[NEWEST], "new": TRUE}
    del shown[NEWEST]["llama"]
    del shown[OLDEST]["Klear"]  # which came later
    gone, new = differences(shown)
    assert f"mlx-lm {NEWEST}: llama is None" in gone
    assert f"mlx-lm {NEWEST}: new is Architecture" in new and "the file has None" in new


def test_a_check_fails_if_a_version_was_added(
    shown: dict[str, dict[str, Architecture]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    versions = [*proven(), "0.32.9"]
    monkeypatch.setattr(facts_file, "proven", lambda: versions)
    shown["0.32.9"] = dict(known()[NEWEST])
    assert main(["--facts", "check"]) == 1
    assert f"expected {OLDEST}, {SECOND}" in capsys.readouterr().out


def test_facts_are_written_for_every_version(
    shown: dict[str, dict[str, Architecture]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(spec, "FILE", tmp_path / "architectures.json")
    shown[SECOND] = {**shown[SECOND], "llama": ALONE}
    assert main(["--facts", "write"]) == 0
    assert spec.FILE.read_text(encoding="utf-8") == written(shown)


@pytest.mark.slow
def test_the_facts_are_those_of_the_installed_version() -> None:
    found, failures = facts_file._evaluated([proven()[-1]], jobs=2, seed=0)
    assert failures == [] and differences(found) == []
