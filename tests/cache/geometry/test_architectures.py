"""Facts hold for mlx-lm's own architectures, in the versions for which they are proven."""

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
    """Stands for the distribution of mlx-lm."""

    def __init__(self, version: str, direct_url: str | None = None) -> None:
        self.version, self.direct_url = version, direct_url

    def read_text(self, name: str) -> str | None:
        return self.direct_url if name == "direct_url.json" else None


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    found = Installed(next(iter(known())))
    monkeypatch.setattr(spec, "distribution", lambda name: found)
    return found


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A file that replaces the package's."""
    monkeypatch.setattr(spec, "FILE", tmp_path / "architectures.json")
    known.cache_clear()
    yield tmp_path / "architectures.json"
    known.cache_clear()


def test_an_architecture_of_the_host_is_known(installed: Installed) -> None:
    model = tiny_llama()
    found = architecture_of(model)
    assert found is not None and found == known()[installed.version]["llama"]
    assert found.batches and found.joins and found.packed and not found.refused
    assert architecture_of(weakref.proxy(model)) == found
    end_on_grid(model)  # another class, of the same code
    assert architecture_of(model) == found


def test_a_class_from_elsewhere_is_unknown(installed: Installed) -> None:
    """A model can bring its own code, which may batch in another way than its base class."""

    class Model(llama.Model):  # type: ignore[misc]
        pass

    model = tiny_llama()
    model.__class__ = Model
    assert architecture_of(model) is None
    assert architecture_of(object()) is None


def test_a_module_that_the_file_does_not_name_is_unknown(installed: Installed) -> None:
    model = type("Model", (), {"__module__": "mlx_lm.models.of_tomorrow"})()
    assert architecture_of(model) is None


def test_facts_are_those_of_the_installed_version(installed: Installed) -> None:
    """internlm2 is wrong in a batch in mlx-lm 0.31.3."""
    model = type("Model", (), {"__module__": "mlx_lm.models.internlm2"})()
    newest = architecture_of(model)
    installed.version = "0.31.3"
    oldest = architecture_of(model)
    assert newest is not None and newest.batches
    assert oldest is not None and not oldest.batches


@pytest.mark.parametrize("version", ["0.31.2", "0.32.2.dev1", "0.32.3", "0.33.0"])
def test_nothing_is_known_in_a_version_that_is_not_proven(
    version: str, installed: Installed
) -> None:
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
def test_nothing_is_known_in_a_snapshot_with_the_number_of_a_release(
    installed: Installed, direct_url: dict[str, Any], is_known: bool
) -> None:
    installed.direct_url = json.dumps(direct_url)
    assert (architecture_of(tiny_llama()) is not None) == is_known


def test_the_file_is_read_once(installed: Installed, file: Path) -> None:
    file.write_bytes(FILE.read_bytes())
    assert architecture_of(tiny_llama()) is not None
    file.unlink()
    assert architecture_of(tiny_llama()) is not None


def cut(content: dict[str, Any]) -> str:
    return json.dumps(content)[:-9]


def renamed(content: dict[str, Any]) -> str:
    return json.dumps(content).replace("batches", "batched")


def headless(content: dict[str, Any]) -> str:
    return json.dumps(content["architectures"])


@pytest.mark.parametrize("damage", [cut, renamed, headless, lambda content: "[]", None])
def test_a_damaged_package_is_an_error_that_names_the_remedy(
    damage: Any, installed: Installed, file: Path
) -> None:
    if damage is not None:
        file.write_text(damage(json.loads(FILE.read_text(encoding="utf-8"))), encoding="utf-8")
    with pytest.raises(KVPersistError, match=r"cannot be used .*pip install --force-reinstall"):
        architecture_of(tiny_llama())
