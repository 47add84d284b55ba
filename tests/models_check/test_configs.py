"""The zoo is complete: every module of the installed mlx-lm is in it, or listed with a reason."""

from __future__ import annotations

import pytest

from models_check.configs import (
    CONFIGS,
    NOT_IN_THE_ZOO,
    available,
    installed_modules,
    module_of,
)


def test_every_installed_module_is_in_the_zoo_or_excluded() -> None:
    known = {module_of(name) for name in CONFIGS} | NOT_IN_THE_ZOO.keys()
    assert [module for module in installed_modules() if module not in known] == []


def test_no_module_is_both_in_the_zoo_and_excluded() -> None:
    assert {module_of(name) for name in CONFIGS} & NOT_IN_THE_ZOO.keys() == set()


def test_models_missing_in_the_installed_version_are_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("models_check.configs.installed_modules", lambda: ["llama", "cache"])
    assert {module_of(name) for name in available()} == {"llama"}


def test_models_that_the_installed_version_cannot_run_are_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("models_check.configs.versions.installed", lambda _: "0.32.0")
    assert "phi3small" not in available()
    monkeypatch.setattr("models_check.configs.versions.installed", lambda _: "0.32.1")
    assert "phi3small" in available()


def test_variants_do_not_repeat_a_configuration() -> None:
    for name, config in CONFIGS.items():
        same = [
            other
            for other, other_config in CONFIGS.items()
            if other != name and module_of(other) == module_of(name) and other_config == config
        ]
        assert same == [], name
