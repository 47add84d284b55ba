"""The file of facts is complete, as it is written, and compared with what versions show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from mlx_lm_kvpersist.cache.geometry import architectures
from mlx_lm_kvpersist.cache.geometry.architectures import FILE, Architecture, known
from models_check import facts_file
from models_check.__main__ import main
from models_check.configs import CONFIGS, module_of
from models_check.facts_file import Facts, differences, over_all, proven, written

TRUE = Architecture(True, True, True)
ALONE = Architecture(False, False, True)


def test_the_file_is_as_it_is_written() -> None:
    """Sorted, one line for each architecture, for the versions that serve."""
    versions, facts = known()
    assert FILE.read_text(encoding="utf-8") == written(facts)
    assert list(versions) == proven() and list(facts) == sorted(facts)


def test_every_architecture_of_the_zoo_is_in_the_file() -> None:
    assert known()[1].keys() == {module_of(name) for name in CONFIGS}


def test_prompts_are_computed_together_only_where_replies_are() -> None:
    assert [name for name, its in known()[1].items() if its.joins and not its.batches] == []


def test_a_fact_holds_in_every_version_that_has_the_module() -> None:
    found = {"0.31.3": {"a": TRUE}, "0.32.0": {"a": ALONE, "b": TRUE}}
    assert over_all(found) == {"a": ALONE, "b": TRUE}


def test_a_file_may_say_less_than_one_version_shows_but_not_more() -> None:
    shipped = {"a": ALONE, "b": TRUE}
    newest = proven()[-1]
    assert differences(shipped, {newest: {"a": TRUE, "b": TRUE}}) == []
    (line,) = differences(shipped, {newest: {"a": TRUE, "b": ALONE}})
    assert line.startswith(f"mlx-lm {newest}: b is Architecture(batches=False")
    refused = Architecture(True, True, True, "why")
    (line,) = differences(shipped, {newest: {"b": refused}})
    assert "refused='why'" in line
    assert differences(shipped, {newest: {"c": TRUE}}) == [f"mlx-lm {newest}: c is not in the file"]


def test_a_file_says_what_all_versions_show() -> None:
    everywhere = {version: {"a": TRUE} for version in proven()}
    assert differences({"a": TRUE}, everywhere) == []
    (line,) = differences({"a": ALONE}, everywhere)
    assert line.startswith("a is Architecture(batches=True") and "every version" in line
    (line,) = differences({"a": TRUE, "gone": TRUE}, everywhere)
    assert line.startswith("gone is None in every version")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, Facts]:
    """What each version shows; at first what the file says. No version is installed for it."""
    found: dict[str, Facts] = {version: dict(known()[1]) for version in proven()}

    def evaluated(
        chosen: Sequence[str], jobs: int, seed: int
    ) -> tuple[dict[str, Facts], list[str]]:
        return {version: found[version] for version in chosen}, []

    monkeypatch.setattr(facts_file, "_evaluated", evaluated)
    return found


def test_a_check_fails_on_a_difference_and_names_it(
    shown: dict[str, Facts], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--facts", "check"]) == 0
    shown[proven()[1]] = {**known()[1], "llama": ALONE}
    assert main(["--facts", "check"]) == 0  # the oldest and the newest version
    assert main(["--facts", "check", "--every-version"]) == 1
    said = capsys.readouterr().out
    assert f"mlx-lm {proven()[1]}: llama is " in said and "--facts write" in said


def test_a_check_fails_if_a_version_was_added(
    shown: dict[str, Facts], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = [*proven(), "0.32.9"]
    monkeypatch.setattr(facts_file, "proven", lambda: versions)
    shown["0.32.9"] = dict(known()[1])
    assert main(["--facts", "check"]) == 1
    assert "expected 0.31.3" in capsys.readouterr().out


def test_facts_are_written_for_every_version(
    shown: dict[str, Facts], monkeypatch: pytest.MonkeyPatch
) -> None:
    written_to = FILE.with_name("architectures-of-a-test.json")
    monkeypatch.setattr(architectures, "FILE", written_to)
    shown[proven()[1]] = {**known()[1], "llama": ALONE}
    try:
        assert main(["--facts", "write"]) == 0
        assert written_to.read_text() == written({**known()[1], "llama": ALONE})
    finally:
        Path(written_to).unlink(missing_ok=True)


@pytest.mark.slow
def test_the_facts_are_those_of_the_installed_version() -> None:
    found, failures = facts_file._evaluated([proven()[-1]], jobs=2, seed=0)
    assert failures == [] and differences(known()[1], found) == []
