"""Loading a model determines its precision, facts and fingerprint without a measurement."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.cache.geometry.fingerprint import model_fingerprint
from mlx_lm_kvpersist.cache.geometry.spec import Architecture
from mlx_lm_kvpersist.cache.measuring.prefill_memory import PrefillMemory
from mlx_lm_kvpersist.cli.quality_checks import server_attention
from mlx_lm_kvpersist.config import KV_BITS
from mlx_lm_kvpersist.errors import ModelNotSupported
from mlx_lm_kvpersist.ranks import Ranks
from mlx_lm_kvpersist.request import model as loading
from mlx_lm_kvpersist.request.model import described

from .conftest import loaded_in, provider_of

DEFAULT = KV_BITS["k8v4"]


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return provider_of(tmp_path_factory.mktemp("model"), n_layers=4)


@pytest.fixture(scope="module", autouse=True)
def patched() -> Iterator[None]:
    """Stock's attention cannot take keys and values of unlike precisions."""
    with server_attention():
        yield


@pytest.mark.parametrize(
    ("bits", "layout", "words"),
    [
        ("k8v4", "k8rv4rb64,c256", "keys 8 bits, values 4, rotated ("),
        ("k6v4", "k6rv4rb64,c256", "keys 6 bits, values 4, rotated ("),
        ("16", "full", "full precision;"),
    ],
)
def test_kv_bits_decide_the_layout_and_its_description(
    provider: Any, bits: str, layout: str, words: str
) -> None:
    loaded = loaded_in(provider, KV_BITS[bits])
    assert loaded.spec.layout == loaded.root.layout == layout
    assert words in described(loaded.spec)


def test_facts_decide_batching_joining_and_packed_keys(
    provider: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = loaded_in(provider, DEFAULT)
    assert known.is_known and known.spec.batches and known.spec.joins
    assert known.spec.plans["0"].can_take_packed
    apart = Architecture(batches=False, joins=False, packed=False)
    monkeypatch.setattr(loading, "architecture_of", lambda model: apart)
    spec = loaded_in(provider, DEFAULT).spec
    assert not (spec.batches or spec.joins or spec.plans["0"].can_take_packed)


def test_without_facts_replies_are_batched_but_prompts_are_not_joined(
    provider: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = loaded_in(provider, DEFAULT)
    monkeypatch.setattr(loading, "architecture_of", lambda model: None)
    caplog.set_level(logging.INFO)
    unknown = loaded_in(provider, DEFAULT)
    assert not unknown.is_known and unknown.root == known.root
    spec = unknown.spec
    assert spec.batches and not spec.joins and not spec.plans["0"].can_take_packed
    assert [record.message for record in caplog.records if "no facts about" in record.message]


def test_a_model_that_keeps_state_outside_its_caches_is_refused(
    provider: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = Architecture(batches=True, joins=True, packed=True, refused="it keeps state outside")
    monkeypatch.setattr(loading, "architecture_of", lambda model: outside)
    with pytest.raises(ModelNotSupported, match="it keeps state outside"):
        loaded_in(provider, DEFAULT)


def test_a_change_of_the_weights_file_changes_the_fingerprint(tmp_path: Path) -> None:
    """Sizes and times stay the same. With the old content the old fingerprint returns."""
    provider = provider_of(tmp_path / "model", n_layers=2)
    first = loaded_in(provider, DEFAULT)
    assert first.fingerprint == model_fingerprint(tmp_path / "model", None)
    weights = next((tmp_path / "model").glob("*.safetensors"))
    stat, content = weights.stat(), weights.read_bytes()

    def fingerprint(content: bytes) -> str:
        weights.write_bytes(content)
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        return loaded_in(provider, DEFAULT).fingerprint

    assert fingerprint(content[:-1] + bytes([content[-1] ^ 1])) != first.fingerprint
    assert fingerprint(content) == first.fingerprint


class RankOfTwo(Ranks):
    """Rank 0 of two; the other rank differs in the values that `differ` names."""

    def __init__(self, *differ: str) -> None:
        super().__init__(2, 0)
        self._differ, self.compared = differ, dict[str, object]()

    def same(self, value: object, what: str) -> bool:
        self.compared[what] = value
        return what not in self._differ

    def agree(self, value: bool, what: str) -> bool:
        return value

    def least(self, value: int, what: str) -> int:
        return value


def ranked(provider: Any) -> Any:
    return SimpleNamespace(**vars(provider), cli_args=SimpleNamespace(pipeline=False))


def test_ranks_with_different_model_files_are_refused(provider: Any) -> None:
    rank = RankOfTwo("the model's files")
    with pytest.raises(ModelNotSupported, match="different files of the model"):
        loaded_in(ranked(provider), DEFAULT, rank)
    own = model_fingerprint(Path(provider.model_key[0]), None)
    assert rank.compared["the model's files"] == own


def test_ranks_with_different_facts_use_no_facts(provider: Any) -> None:
    rank = RankOfTwo("the facts of the architecture")
    assert not loaded_in(ranked(provider), DEFAULT, rank).is_known
    rank = RankOfTwo("the kinds of layers")
    with pytest.raises(ModelNotSupported, match="layers of different kinds"):
        loaded_in(ranked(provider), DEFAULT, rank)


class RankOfUnsupportedModel(RankOfTwo):
    """A rank whose other rank does not support the model."""

    def agree(self, value: bool, what: str) -> bool:
        return value and what != "whether the model is supported"


def test_a_model_that_another_rank_refuses_is_refused(provider: Any) -> None:
    with pytest.raises(ModelNotSupported, match="another rank does not support the model"):
        loaded_in(ranked(provider), DEFAULT, RankOfUnsupportedModel())


def test_an_unexpected_error_makes_the_model_unsupported(
    provider: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strange(*_: Any) -> None:
        raise AttributeError("no such argument")

    monkeypatch.setattr(PrefillMemory, "of", strange)
    with pytest.raises(ModelNotSupported, match=r"cannot be examined: .*no such argument"):
        loaded_in(provider, DEFAULT)
