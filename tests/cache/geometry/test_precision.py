from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.cache.geometry.kinds import GroupKind
from mlx_lm_kvpersist.cache.geometry.precision import (
    FULL_BITS,
    GROUP_SIZES,
    KVPrecision,
    PrecisionChoice,
    Quantization,
    layout_in_words,
)
from mlx_lm_kvpersist.cache.geometry.spec import (
    LayerGroup,
    TensorShape,
    probe_model,
    token_arrays,
)
from mlx_lm_kvpersist.cache.live.packed import (
    as_it_came,
    prepared,
    quantize,
    read,
    rotation,
)

from ..conftest import tiny_llama


def test_precision_name_has_bits_and_group_size() -> None:
    assert str(KVPrecision.of()) == "4b64"
    assert str(KVPrecision.of(8, 32)) == "8b32"


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_array_sizes_match_mx_quantize(bits: int, group_size: int) -> None:
    shape = TensorShape(2, 256, "float16")
    precision = KVPrecision.of(bits, group_size)
    group = LayerGroup("0", GroupKind.FULL, "KVCache", (0, 1), shape, shape, precision)
    packed = mx.quantize(mx.ones((2, 2, 5, 256), mx.float16), group_size=group_size, bits=bits)
    assert [form[1:] for form in token_arrays([group], 5)] == [
        (x.shape, x.dtype) for x in packed
    ] * 2
    assert group.bytes_per_token == 2 * sum(x.nbytes for x in packed) // 5
    assert group.full_precision_bytes == 2 * 2 * 2 * 256 * 2


def test_scales_have_16_bits_for_every_model_dtype() -> None:
    """float32 gets bfloat16 scales, which have the same range of numbers."""
    x = mx.random.normal((1, 2, 5, 64), key=mx.random.key(1))
    for dtype, scales in ((mx.float32, mx.bfloat16), (mx.float16, mx.float16)):
        packed = quantize(x.astype(dtype), Quantization(8, 32))
        assert [array.dtype for array in packed] == [mx.uint32, scales, scales]
    for factor in (1e30, 1e-3):
        how = Quantization(8, 32)
        actual = read(quantize(factor * x, how), how, mx.float32)
        error = mx.linalg.norm(actual / factor - x)
        assert error < 0.01 * mx.linalg.norm(x)


def test_a_head_is_padded_to_whole_groups() -> None:
    assert Quantization(4, 32).fitted(96) == Quantization(4, 32)
    assert Quantization(4, 64, True).fitted(96) == Quantization(4, 64, True, 32)
    precision = KVPrecision.of(6, 32, 4, rotated=True).fitted(80, 64)
    assert str(precision) == "k6rp16v4rb32" and precision.fitted(80, 64) == precision
    assert str(KVPrecision.of(4, 32).fitted(80, 80)) == "4p16b32"


def test_keys_and_values_may_have_different_bits() -> None:
    precision = KVPrecision.of(8, 64, 4)
    assert str(precision) == "k8v4b64"
    assert (precision.keys, precision.values) == (Quantization(8, 64), Quantization(4, 64))
    assert KVPrecision.of(8, 64, 8) == KVPrecision.of(8, 64)


@pytest.mark.parametrize(
    ("precision", "name"),
    [
        (KVPrecision.of(4, 64), "4b64"),
        (KVPrecision.of(8, 32, rotated=True), "8rb32"),
        (KVPrecision.of(8, 64, 4), "k8v4b64"),
        (KVPrecision.of(6, 128, 4, rotated=True), "k6rv4rb128"),
        (KVPrecision.of(4, 32).fitted(80, 80), "4p16b32"),
        (KVPrecision.of(4, 64, rotated=True).fitted(40, 40), "4rp24b64"),
        (KVPrecision.of(6, 32, 4, rotated=True).fitted(80, 64), "k6rp16v4rb32"),
        (KVPrecision.of(6, 64, 4, rotated=True).fitted(64, 56), "k6rv4rp8b64"),
    ],
)
def test_precision_names_are_stable(precision: KVPrecision, name: str) -> None:
    """Names are part of every stored conversation's root: they must not change."""
    assert str(precision) == name
    bits = f"keys {precision.keys.bits} bits, values {precision.values.bits}"
    assert layout_in_words(name).startswith(bits)


@pytest.mark.parametrize("name", ["16b64", "k16v4b64", "k77v4b64", "k4b64", "4b", "b64"])
def test_invalid_layout_names_are_shown_unchanged(name: str) -> None:
    assert layout_in_words(name) == name


def test_rotation_is_part_of_the_name() -> None:
    assert [str(KVPrecision.of(4, 64, rotated=rotated)) for rotated in (False, True)] == [
        "4b64",
        "4rb64",
    ]
    assert str(KVPrecision.of(6, 32, 4, rotated=True)) == "k6rv4rb32"


HEAD_SIZES = [32, 40, 48, 64, 72, 80, 88, 96, 100, 104, 112, 120, 128, 160, 192, 256, 288, 576]


@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_rotating_keeps_products_and_spreads_outliers(dim: int) -> None:
    how = Quantization(4, 32, rotated=True).fitted(dim)
    width = dim + how.padding
    matrix = rotation(dim, width, mx.float32)
    assert matrix.shape == (dim, width)
    assert mx.abs(matrix @ matrix.T - mx.eye(dim)).max() < 1e-5
    x = mx.random.normal((3, dim), key=mx.random.key(1))
    assert mx.abs(as_it_came(prepared(x, how), how) - x).max() < 1e-4
    outlier = prepared(mx.eye(dim)[:1], how)
    assert mx.abs(outlier).max() < 3 * width**-0.5


@pytest.mark.parametrize(
    ("dim", "width"), [(64, 64), (80, 96), (96, 96), (112, 128), (128, 128), (192, 192), (256, 256)]
)
def test_usual_head_sizes_have_a_hadamard_matrix(dim: int, width: int) -> None:
    """All its entries have the same magnitude, which spreads outliers best."""
    assert mx.abs(mx.abs(rotation(dim, width, mx.float32)) - width**-0.5).max() < 1e-5


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_padding_costs_no_precision(dim: int, rotated: bool) -> None:
    """The error is at most 3% above that of whole groups."""
    x = mx.random.normal((1, 2, 500, dim), key=mx.random.key(3))
    how = Quantization(6, 32, rotated).fitted(dim)
    packed = quantize(x, how)
    assert packed[0].shape[-1] * 32 == (dim + how.padding) * 6
    error = mx.square(read(packed, how, mx.float32) - x).mean()
    whole = mx.random.normal((1, 2, 2000, 32), key=mx.random.key(4))
    groups = Quantization(6, 32)
    expected = mx.square(read(quantize(whole, groups), groups, mx.float32) - whole)
    assert read(packed, how, mx.float32).shape == x.shape
    assert error < 1.03 * expected.mean()


def test_rotated_numbers_are_read_back_with_smaller_errors() -> None:
    x = mx.random.normal((1, 2, 5, 96), key=mx.random.key(2))
    x[..., 7] *= 40
    errors = {}
    for rotated in (False, True):
        how = Quantization(4, 32, rotated)
        packed = quantize(x, how)
        assert mx.abs(read(packed, how, mx.float32) - x).max() < 10
        errors[rotated] = float(mx.square(read(packed, how, mx.float32) - x).mean())
    assert errors[True] < errors[False] / 2


def test_precision_choice_lists_its_candidates() -> None:
    sizes = [KVPrecision.of(8, size, 4, rotated=True) for size in GROUP_SIZES]
    assert PrecisionChoice().candidates() == sizes
    assert PrecisionChoice(4, 4, 32, False).candidates() == [KVPrecision.of(4, 32)]
    own = PrecisionChoice(FULL_BITS, FULL_BITS)
    assert own.is_full_precision and own.candidates() == []


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("4b64", "keys 4 bits, values 4"),
        ("4rb64", "keys 4 bits, values 4, rotated"),
        ("k8v4b32", "keys 8 bits, values 4"),
        ("k8rv4rb64,c256", "keys 8 bits, values 4, rotated"),
        ("k6rp16v4rb32*2,k6rv4rb32,c256", "keys 6 bits, values 4, rotated"),
        ("k16v4rb64", "k16v4rb64"),
        ("full*1,4b64*3", "keys 4 bits, values 4, some layers in full precision"),
        ("full", "full precision"),
        ("full,w128,state", "full precision"),
        ("8b64,w128", "keys 8 bits, values 8"),
        ("w128", "windows and states alone"),
        ("state", "windows and states alone"),
        ("of a later version", "of a later version"),
        ("", ""),
    ],
)
def test_layouts_are_described_in_words(layout: str, words: str) -> None:
    assert layout_in_words(layout) == words


def test_layouts_of_probed_models_are_described_in_words() -> None:
    model = tiny_llama()
    for choice, words in (
        (PrecisionChoice(4, 4, rotated=False), "keys 4 bits, values 4"),
        (PrecisionChoice(), "keys 8 bits, values 4, rotated"),
    ):
        spec = probe_model(model, choice)
        assert layout_in_words(spec.layout).startswith(words)
