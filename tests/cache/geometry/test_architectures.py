"""Facts exist only for mlx-lm's own architectures, in the tested versions of mlx-lm."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models import llama

from mlx_lm_kvpersist.cache.geometry import spec
from mlx_lm_kvpersist.cache.geometry.kinds import end_on_grid
from mlx_lm_kvpersist.cache.geometry.spec import FILE, architecture_of, known
from mlx_lm_kvpersist.errors import KVPersistError

from ..conftest import tiny_llama


class Installed:
    """A stand-in for the distribution of mlx-lm."""

    def __init__(self, version: str, direct_url: str | None = None) -> None:
        self.version, self.direct_url = version, direct_url

    def read_text(self, name: str) -> str | None:
        return self.direct_url if name == "direct_url.json" else None


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    stand_in = Installed(next(iter(known())))
    monkeypatch.setattr(spec, "distribution", lambda name: stand_in)
    return stand_in


@pytest.fixture
def facts_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The path of a file that replaces the package's facts."""
    monkeypatch.setattr(spec, "FILE", tmp_path / "architectures.json")
    known.cache_clear()
    yield tmp_path / "architectures.json"
    known.cache_clear()


def test_mlx_lm_architectures_have_facts(installed: Installed) -> None:
    model = tiny_llama()
    facts = architecture_of(model)
    assert facts is not None and facts == known()[installed.version]["llama"]
    assert facts.batches and facts.joins and facts.packed and not facts.refused
    assert architecture_of(weakref.proxy(model)) == facts
    end_on_grid(model)  # gives the model another class with the same code
    assert architecture_of(model) == facts


def test_model_class_outside_mlx_lm_has_no_facts(installed: Installed) -> None:
    """A model's own code may batch differently from its base class."""

    class Model(llama.Model):  # type: ignore[misc]
        pass

    model = tiny_llama()
    model.__class__ = Model
    assert architecture_of(model) is None
    assert architecture_of(object()) is None


def test_module_missing_from_the_facts_file_has_no_facts(installed: Installed) -> None:
    model = type("Model", (), {"__module__": "mlx_lm.models.of_tomorrow"})()
    assert architecture_of(model) is None


def test_facts_match_the_installed_mlx_lm_version(installed: Installed) -> None:
    """mlx-lm 0.31.3 computes internlm2 wrongly in a batch."""
    model = type("Model", (), {"__module__": "mlx_lm.models.internlm2"})()
    newest = architecture_of(model)
    installed.version = "0.31.3"
    oldest = architecture_of(model)
    assert newest is not None and newest.batches
    assert oldest is not None and not oldest.batches


@pytest.mark.parametrize("version", ["0.31.2", "0.32.2.dev1", "0.32.3", "0.33.0"])
def test_untested_mlx_lm_versions_have_no_facts(version: str, installed: Installed) -> None:
    installed.version = version
    assert architecture_of(tiny_llama()) is None


@pytest.mark.parametrize(
    ("direct_url", "is_known"),
    [
        ({"url": "file:///wheels/mlx_lm.whl", "archive_info": {}}, True),
        ({"url": "https://github.com/x/mlx-lm", "vcs_info": {"vcs": "git"}}, False),
        ({"url": "file:///home/me/mlx-lm", "dir_info": {"editable": True}}, False),
    ],
)
def test_source_checkouts_with_a_release_version_have_no_facts(
    installed: Installed, direct_url: dict[str, Any], is_known: bool
) -> None:
    installed.direct_url = json.dumps(direct_url)
    assert (architecture_of(tiny_llama()) is not None) == is_known


def test_facts_file_is_read_once(installed: Installed, facts_file: Path) -> None:
    facts_file.write_bytes(FILE.read_bytes())
    assert architecture_of(tiny_llama()) is not None
    facts_file.unlink()
    assert architecture_of(tiny_llama()) is not None


def truncated(content: dict[str, Any]) -> str:
    return json.dumps(content)[:-9]


def with_renamed_field(content: dict[str, Any]) -> str:
    return json.dumps(content).replace("batches", "batched")


def without_header(content: dict[str, Any]) -> str:
    return json.dumps(content["architectures"])


@pytest.mark.parametrize(
    "damage", [truncated, with_renamed_field, without_header, lambda content: "[]", None]
)
def test_damaged_facts_file_raises_an_error_with_the_remedy(
    damage: Any, installed: Installed, facts_file: Path
) -> None:
    if damage is not None:
        facts_file.write_text(
            damage(json.loads(FILE.read_text(encoding="utf-8"))), encoding="utf-8"
        )
    with pytest.raises(KVPersistError, match=r"cannot be used .*pip install --force-reinstall"):
        architecture_of(tiny_llama())
