"""What was chosen for a model is found again, for that model and request alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlx_lm_kvpersist.cache.geometry.kinds import GroupKind
from mlx_lm_kvpersist.cache.geometry.precision import (
    Allocation,
    Estimate,
    KVPrecision,
    PrecisionRequest,
)
from mlx_lm_kvpersist.cache.geometry.spec import LayerGroup, ModelCacheSpec, TensorShape
from mlx_lm_kvpersist.cache.measuring.persisted_allocation import (
    adopt_choices,
    chosen_as,
    known_allocation,
    put_allocation,
    suits,
)

from .in_memory import InMemory

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


def test_what_was_chosen_is_found_again(caplog: pytest.LogCaptureFixture) -> None:
    persisted = InMemory()
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
    put_allocation(persisted, "model", request, chosen)
    put_allocation(persisted, "other", request, Allocation({0: None}))
    assert known_allocation(persisted, "model", request) == chosen
    assert known_allocation(persisted, "other", request) == Allocation({0: None})
    assert known_allocation(persisted, "third", request) is None
    assert known_allocation(persisted, "model", PrecisionRequest(target_nats=0.02)) is None
    assert known_allocation(persisted, "model", PrecisionRequest((4, 4))) is None
    assert not caplog.records
    persisted[next(iter(persisted))]["slots"]["0"] = "k7"
    assert known_allocation(persisted, "model", request) is None
    assert "measured again" in caplog.text


@pytest.mark.parametrize(
    ("layout", "precisions"),
    [
        ("4b64", {1: FOUR, 0: FOUR}),
        ("4b64*2,8b64*1", {2: EIGHT, 0: FOUR, 1: FOUR}),
        ("full*1,4b64*1,w128,state", {0: None, 5: FOUR}),
        ("full,w128,w512", {3: None}),
        ("state", {}),
    ],
)
def test_choices_travel_to_another_store(
    layout: str, precisions: dict[int, KVPrecision | None]
) -> None:
    """Those of this model and layout, unless the other store has its own."""
    here, there = InMemory(), InMemory()
    tenth = PrecisionRequest(target_nats=0.1)
    chosen = Allocation(precisions, Estimate(0.009, 0.001), "2026-01-02", 60.0)
    put_allocation(here, "model", REQUEST, chosen)
    put_allocation(here, "model2", REQUEST, chosen)
    put_allocation(here, "model", tenth, Allocation({0: EIGHT, 1: EIGHT, 2: FOUR, 3: FOUR}))
    choices = chosen_as(here, "model", layout)
    assert list(choices) == [f"model {REQUEST}"]
    adopt_choices(there, "model", layout, choices)
    assert known_allocation(there, "model", REQUEST) == chosen
    own = replace(chosen, measured_on="2026-03-04")
    put_allocation(there, "model", REQUEST, own)
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
def test_a_damaged_choice_is_no_choice(damaged: Any) -> None:
    here, there = InMemory(), InMemory()
    four = PrecisionRequest((4, 4))
    put_allocation(here, "model", REQUEST, Allocation({0: FOUR}))
    here[next(iter(here))] = damaged
    put_allocation(here, "model", four, Allocation({0: FOUR}))
    assert known_allocation(here, "model", REQUEST) is None
    assert list(chosen_as(here, "model", "4b64")) == [f"model {four}"]
    with pytest.raises(ValueError):
        adopt_choices(there, "model", "4b64", {f"model {REQUEST}": damaged})
    assert there == {}
