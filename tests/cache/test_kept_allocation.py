"""What was chosen for a model is found again, for that model and request alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvpersist.cache.kept_allocation import (
    adopt_choices,
    chosen_as,
    keep_allocation,
    known_allocation,
    suits,
)
from mlx_lm_kvpersist.cache.precision import Allocation, Estimate, KVPrecision, PrecisionRequest
from mlx_lm_kvpersist.cache.spec import GroupKind, LayerGroup, ModelCacheSpec, TensorShape

N_LAYERS = 4
FOUR, EIGHT = KVPrecision.of(4, 64), KVPrecision.of(8, 64)
REQUEST = PrecisionRequest()


@pytest.fixture
def spec() -> ModelCacheSpec:
    shape = TensorShape(2, 64, "float32")
    slots = tuple(range(N_LAYERS))
    group = LayerGroup("0", GroupKind.FULL, "KVCache", slots, shape, shape, FOUR)
    return ModelCacheSpec((group,), [])


@pytest.mark.parametrize(
    ("change", "usable"),
    [
        ({}, True),
        ({"cut_at_s": 60.0}, True),
        ({"cut_at_s": 59.0}, False),
        ({"precisions": {0: None}}, False),
        ({"precisions": {0: FOUR, 1: None, 2: EIGHT, 3: None}}, True),
        ({"precisions": dict.fromkeys(range(N_LAYERS), KVPrecision.of(4, 32))}, False),
        ({"precisions": {0: FOUR, 1: None, 2: None, 3: KVPrecision.of(4, 32)}}, False),
    ],
)
def test_only_what_suits_the_model_is_taken(
    spec: ModelCacheSpec, change: dict[str, Any], usable: bool
) -> None:
    made = Allocation(dict.fromkeys(range(N_LAYERS), FOUR))
    assert suits(replace(made, **change), spec, PrecisionRequest(measure_s=60.0)) is usable
    own = replace(spec, groups=tuple(replace(g, precision=None) for g in spec.groups))
    assert not suits(made, own, PrecisionRequest(measure_s=60.0))


def test_what_was_chosen_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "precision.json"
    request = PrecisionRequest()
    chosen = Allocation(
        {
            0: KVPrecision.of(6, 32, 4, rotated=(True, False)),
            2: KVPrecision.of(16, 32, 4, rotated=(False, True)),
            3: None,
        },
        Estimate(0.009, 0.001),
        "2026-01-02",
        60.0,
    )
    keep_allocation(file, "model", request, chosen)
    keep_allocation(file, "other", request, Allocation({0: None}))
    assert known_allocation(file, "model", request) == chosen
    assert known_allocation(file, "other", request) == Allocation({0: None})
    assert known_allocation(file, "third", request) is None
    assert known_allocation(file, "model", PrecisionRequest(target_nats=0.02)) is None
    assert known_allocation(file, "model", PrecisionRequest((4, 4))) is None
    assert not caplog.records
    file.write_text(file.read_text().replace("k6rv4b32", "k7"))
    assert known_allocation(file, "model", request) is None
    assert "measured again" in caplog.text


def test_what_earlier_versions_chose_is_read(tmp_path: Path) -> None:
    """Other bits would be another root: conversations stored before would not be found."""
    file = tmp_path / "precision.json"
    slots = '{"0": "k6rv4b64", "1": "own", "2": "8b64"}'
    kept = f'{{"slots": {slots}, "divergence": [0.009, 0.001], "measured_on": "2026-01-02"}}'
    name = "model 0.01 nats, group auto, rotate auto"
    file.write_text(f'{{"format": 1, "measured": {{"{name}": {kept}}}}}')
    assert known_allocation(file, "model", PrecisionRequest()) == Allocation(
        {0: KVPrecision.of(6, 64, 4, rotated=(True, False)), 1: None, 2: EIGHT},
        Estimate(0.009, 0.001),
        "2026-01-02",
    )


def kept(file: Path, name: str) -> Any:
    return json.loads(file.read_text())["measured"].get(name)


@pytest.mark.parametrize(
    ("layout", "precisions"),
    [
        ("4b64", {1: FOUR, 0: FOUR}),
        ("4b64*2,8b64*1", {2: EIGHT, 0: FOUR, 1: FOUR}),
        ("own*1,4b64*1,w128,state", {0: None, 5: FOUR}),
        ("own,w128,w512", {3: None}),
        ("state", {}),
    ],
)
def test_choices_travel_to_another_store(
    tmp_path: Path, layout: str, precisions: dict[int, KVPrecision | None]
) -> None:
    """Those of this model and layout, unless the other store has its own."""
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    tenth = PrecisionRequest(target_nats=0.1)
    chosen = Allocation(precisions, Estimate(0.009, 0.001), "2026-01-02", 60.0)
    keep_allocation(here, "model", REQUEST, chosen)
    keep_allocation(here, "model2", REQUEST, chosen)
    keep_allocation(here, "model", tenth, Allocation({0: EIGHT, 1: EIGHT, 2: FOUR, 3: FOUR}))
    choices = chosen_as(here, "model", layout)
    assert choices == {f"model {REQUEST}": kept(here, f"model {REQUEST}")}
    adopt_choices(there, "model", layout, choices)
    assert known_allocation(there, "model", REQUEST) == chosen
    own = replace(chosen, measured_on="2026-03-04")
    keep_allocation(there, "model", REQUEST, own)
    adopt_choices(there, "model", layout, choices)
    assert known_allocation(there, "model", REQUEST) == own
    for model, other in (("model2", layout), ("model", "8b64"), ("model", "4b64*1,8b64*2")):
        with pytest.raises(ValueError, match="is of another model or precision"):
            adopt_choices(there, model, other, choices)


DAMAGED: list[Any] = [
    None,
    {},
    {"slots": [], "divergence": None, "measured_on": ""},
    {"slots": {"0": "4b64"}, "divergence": 1, "measured_on": ""},
    {"slots": {"0": "k7"}, "divergence": None, "measured_on": ""},
    {"slots": {"x": "4b64"}, "divergence": None, "measured_on": ""},
    {"slots": {"0": "4b64"}, "divergence": None},
]


@pytest.mark.parametrize("damaged", DAMAGED, ids=str)
def test_a_damaged_choice_is_no_choice(
    tmp_path: Path, damaged: Any, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "precision.json"
    keep_allocation(file, "model", PrecisionRequest((4, 4)), Allocation({0: FOUR}))
    content = json.loads(file.read_text())
    names = [f"model {REQUEST}", f"model {PrecisionRequest((4, 4))}"]
    content["measured"] = {names[0]: damaged, **content["measured"]}
    file.write_text(json.dumps(content))
    assert known_allocation(file, "model", REQUEST) is None
    assert list(chosen_as(file, "model", "4b64")) == names[1:]
    with pytest.raises(ValueError):
        adopt_choices(tmp_path / "there.json", "model", "4b64", {names[0]: damaged})
    assert not (tmp_path / "there.json").exists()
