"""How options read sizes and folders, and how messages show sizes (powers of 1024) and texts."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from pathlib import Path

_UNITS = "KMGT"


def parse_size(text: str) -> int:
    """Return a size in bytes: a number and a unit, K, M, G or T (powers of 1024).

    A bare number means bytes, as "8B" does, and must be 0 or at least 1048576: in "8", the unit
    was probably forgotten. Raises ArgumentTypeError for anything else.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d+)?)\s*([kmgt]?)(i?b)?\s*", text.lower(), re.ASCII)
    if match is None:
        raise ArgumentTypeError(f"{text!r} is not a size; write for example 8G or 512M")
    number, unit = float(match[1]), match[2].upper()
    if not unit and not match[3] and 0 < number < 1 << 20:
        raise ArgumentTypeError(
            f"{text!r} has no unit; write {match[1]}G, {match[1]}M or {match[1]}K"
        )
    return int(number * 1024 ** (_UNITS.index(unit) + 1 if unit else 0))


def parse_days(text: str) -> float:
    """Return an age in seconds: days (14d) or hours (36h). Raises ArgumentTypeError."""
    match = re.fullmatch(r"(\d{1,9})([dh])", text.strip().lower(), re.ASCII)
    if match is None:
        raise ArgumentTypeError(f"{text!r} is not an age; write for example 14d or 36h")
    return int(match[1]) * {"d": 86400.0, "h": 3600.0}[match[2]]


def parse_file(text: str) -> Path:
    """Return a file as an absolute path. Expands `~`, because shells do not in --option=~/file."""
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise ArgumentTypeError(f"{text!r}: {error}") from error


def parse_folder(text: str) -> Path:
    """Return a folder as an absolute path. Raises ArgumentTypeError for an empty name."""
    folder = parse_file(text)
    if not text.strip():
        raise ArgumentTypeError(
            f"{text!r} names no folder (is a variable unset?); name a folder, or leave the "
            "option out"
        )
    return folder


def show_bytes(n_bytes: float) -> str:
    """Return a size for people, such as "4.2 MiB"."""
    if abs(n_bytes) < 1024:
        return f"{n_bytes:.0f} B"
    for unit in _UNITS:
        n_bytes /= 1024
        # 1023.95 would otherwise be shown as 1024.0.
        if abs(n_bytes) < 1023.95 or unit == _UNITS[-1]:
            break
    return f"{n_bytes:.1f} {unit}iB"


def shortened(text: str, max_chars: int) -> str:
    """Return a text of at most `max_chars` characters; a cut text ends with an ellipsis."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"
