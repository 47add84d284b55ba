from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.cache.packed import GROUP_SIZES, OWN_BITS, KVPrecision, PrecisionChoice
from mlx_lm_kvpersist.cache.spec import GroupKind, LayerGroup, TensorShape, token_arrays


def test_reads_like_a_name() -> None:
    assert str(KVPrecision()) == "4b64"
    assert str(KVPrecision(8, 32)) == "8b32"


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_sizes_are_those_of_mx_quantize(bits: int, group_size: int) -> None:
    shape = TensorShape(2, 256, "float32")
    precision = KVPrecision(bits, group_size)
    group = LayerGroup("0", GroupKind.FULL, "KVCache", (0, 1), shape, shape, precision)
    packed = mx.quantize(mx.ones((2, 2, 5, 256)), group_size=group_size, bits=bits)
    assert [form[1:] for form in token_arrays([group], 5)] == [
        (x.shape, x.dtype) for x in packed
    ] * 2
    assert group.bytes_per_token == 2 * sum(x.nbytes for x in packed) // 5
    assert group.full_precision_bytes == 2 * 2 * 2 * 256 * 4


def test_a_dimension_fits_in_whole_groups_only() -> None:
    assert KVPrecision(4, 32).fits(96)
    assert not KVPrecision(4, 64).fits(96)
    assert not KVPrecision().fits(0)


@pytest.mark.parametrize(("bits", "group_size"), [(7, 64), (4, 16), (4, 0)])
def test_what_mlx_cannot_do_is_refused(bits: int, group_size: int) -> None:
    with pytest.raises(ValueError, match="MLX quantizes"):
        KVPrecision(bits, group_size)


def test_values_may_take_other_bits() -> None:
    precision = KVPrecision(8, 64, 4)
    assert str(precision) == "k8v4b64"
    assert precision.of_values == KVPrecision(4, 64)
    assert precision.of_values.of_values == KVPrecision(4, 64)
    assert KVPrecision(8, 64, 8) == KVPrecision(8, 64)
    assert len({precision, KVPrecision(8, 64), precision.of_values}) == 3
    with pytest.raises(ValueError, match="bits is 7"):
        KVPrecision(8, 64, 7)


def test_what_is_asked_for_names_what_to_try() -> None:
    assert PrecisionChoice().candidates() == [KVPrecision(4, size) for size in GROUP_SIZES]
    assert PrecisionChoice(8, 4, 32).candidates() == [KVPrecision(8, 32, 4)]
    own = PrecisionChoice(OWN_BITS, OWN_BITS)
    assert own.is_own and own.candidates() == []
