from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from mlx_lm_kvpersist.units import parse_days, parse_size, show_bytes


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("8B", 8),
        ("8G", 8 << 30),
        ("1.5 MB", 3 << 19),
        ("2k", 2048),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes_are_parsed_in_binary_units(text: str, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "8 apples", "-1G", "G", "1e9", "\u0668G", "9" * 400])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="write for example 8G"):
        parse_size(text)


@pytest.mark.parametrize("text", ["14", "-1d", f"{'9' * 400}d", f"{'9' * 5000}h"])
def test_invalid_ages_are_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="write for example 14d"):
        parse_days(text)


@pytest.mark.parametrize("text", ["8", "1000", "1048575"])
def test_small_numbers_without_a_unit_are_refused_with_suggestions(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"write {text}G, {text}M or {text}K"):
        parse_size(text)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1500, "1.5 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (4404019, "4.2 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 52, "4096.0 TiB"),
        (-(1 << 20), "-1.0 MiB"),
    ],
)
def test_sizes_are_shown_in_binary_units(n_bytes: int, text: str) -> None:
    assert show_bytes(n_bytes) == text
