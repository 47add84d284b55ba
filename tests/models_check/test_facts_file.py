"""The file of facts is complete and formatted, and is compared with every version's facts."""

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


def test_the_file_has_its_written_form() -> None:
    """Sorted, one line for each architecture, for the versions that serve."""
    assert FILE.read_text(encoding="utf-8") == written(known())
    assert sorted(known()) == proven()
    assert list(known()[NEWEST]) == sorted(known()[NEWEST])


def test_every_architecture_of_the_zoo_is_in_the_file() -> None:
    assert known()[NEWEST].keys() == {module_of(name) for name in CONFIGS}


@pytest.mark.parametrize("version", proven())
def test_joining_prompts_implies_batching_replies(version: str) -> None:
    assert [
        name for name, facts in known()[version].items() if facts.joins and not facts.batches
    ] == []


def test_older_versions_have_their_own_facts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused = Architecture(False, False, False, "why")
    facts = {
        OLDEST: {"a": ALONE, "gone": TRUE},
        SECOND: {"a": TRUE, "b": refused},
        NEWEST: {"a": TRUE, "b": TRUE},
    }
    monkeypatch.setattr(spec, "FILE", tmp_path / "architectures.json")
    spec.FILE.write_text(written(facts), encoding="utf-8")
    known.cache_clear()
    try:
        shipped = known()
    finally:
        known.cache_clear()
    assert shipped == {**facts, OLDEST: {"a": ALONE, "b": TRUE, "gone": TRUE}}


@pytest.fixture
def version_facts(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Architecture]]:
    """The facts of each version, initially those of the file. No version is installed."""
    facts = {version: dict(known()[version]) for version in proven()}

    def evaluated(
        chosen: Sequence[str], jobs: int, seed: int
    ) -> tuple[dict[str, dict[str, Architecture]], list[str]]:
        return {version: facts[version] for version in chosen}, []

    monkeypatch.setattr(facts_file, "_evaluated", evaluated)
    return facts


def test_a_check_fails_on_a_difference_and_prints_it(
    version_facts: dict[str, dict[str, Architecture]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--facts", "check"]) == 0
    version_facts[SECOND] = {**version_facts[SECOND], "llama": ALONE}
    assert main(["--facts", "check"]) == 0  # checks only the oldest and the newest version
    assert main(["--facts", "check", "--every-version"]) == 1
    output = capsys.readouterr().out
    assert f"mlx-lm {SECOND}: llama is Architecture(batches=False" in output
    assert "--facts write" in output


def test_a_check_fails_on_a_new_or_missing_module(
    version_facts: dict[str, dict[str, Architecture]],
) -> None:
    version_facts[NEWEST] = {**version_facts[NEWEST], "new": TRUE}
    del version_facts[NEWEST]["llama"]
    del version_facts[OLDEST]["Klear"]  # newer than the oldest version
    missing_line, new_line = differences(version_facts)
    assert f"mlx-lm {NEWEST}: llama is None" in missing_line
    assert f"mlx-lm {NEWEST}: new is Architecture" in new_line and "the file has None" in new_line


def test_a_check_fails_if_a_version_was_added(
    version_facts: dict[str, dict[str, Architecture]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    versions = [*proven(), "0.32.9"]
    monkeypatch.setattr(facts_file, "proven", lambda: versions)
    version_facts["0.32.9"] = dict(known()[NEWEST])
    assert main(["--facts", "check"]) == 1
    assert f"expected {OLDEST}, {SECOND}" in capsys.readouterr().out


def test_facts_are_written_for_every_version(
    version_facts: dict[str, dict[str, Architecture]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(spec, "FILE", tmp_path / "architectures.json")
    version_facts[SECOND] = {**version_facts[SECOND], "llama": ALONE}
    assert main(["--facts", "write"]) == 0
    assert spec.FILE.read_text(encoding="utf-8") == written(version_facts)


@pytest.mark.slow
def test_the_file_matches_an_evaluation_of_the_newest_version() -> None:
    facts, failures = facts_file._evaluated([proven()[-1]], jobs=2, seed=0)
    assert failures == [] and differences(facts) == []
