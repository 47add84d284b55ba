"""The versions of mlx-lm and mlx that work together, as measured; see docs/compatibility.md.

Versions older than the measured versions are refused, because they hang or do not start. A newer
mlx, or a newer mlx-lm below `CEILING`, is tried: each patch checks the host, and is then tested.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib import metadata

from ...errors import UnsupportedVersion

Version = tuple[int, int, int]

# begin bounds, written by `python -m patches_check --matrix write`
FLOOR: Version = (0, 31, 3)
CEILING: Version = (0, 33, 0)
"""The first mlx-lm that is refused."""
NEWEST_MLX: Version = (0, 32, 4)
# end bounds
METAL_FLOOR: Version = (0, 32, 1)
"""The oldest mlx for macOS. With older mlx, a GPU error ended the process (mlx#3523), and products
of packed keys were wrong for some heads and lengths (mlx#3497, #3631, #4250)."""


@dataclass(frozen=True)
class Pair:
    """A version of mlx-lm, and the first and last measured mlx that serves with it."""

    mlx_lm: Version
    oldest_mlx: Version
    newest_mlx: Version = NEWEST_MLX

    @property
    def oldest_here(self) -> Version:
        """The oldest mlx that this platform may serve with."""
        return max(self.oldest_mlx, METAL_FLOOR) if sys.platform == "darwin" else self.oldest_mlx

    def __str__(self) -> str:
        lm, oldest, newest = map(text, (self.mlx_lm, self.oldest_here, self.newest_mlx))
        return f"mlx-lm {lm} with mlx {oldest} to {newest}"


# begin pairs, written by `python -m patches_check --matrix write`
PAIRS = (
    Pair((0, 31, 3), oldest_mlx=(0, 31, 2)),
    Pair((0, 32, 0), oldest_mlx=(0, 31, 2)),
    Pair((0, 32, 1), oldest_mlx=(0, 32, 0)),
    Pair((0, 32, 2), oldest_mlx=(0, 32, 2)),
)
# end pairs


def check() -> None:
    """Raise UnsupportedVersion unless the installed mlx-lm and mlx can serve together."""
    check_pair(installed("mlx-lm"), installed("mlx"))


def check_pair(mlx_lm: str, mlx: str) -> None:
    """Raise UnsupportedVersion for an unsupported mlx-lm, or an mlx that is too old for it."""
    found_lm, found_mlx = parse(mlx_lm), parse(mlx)
    if not FLOOR <= found_lm < CEILING:
        raise UnsupportedVersion(
            f"found mlx-lm {mlx_lm}, supported are {text(FLOOR)} up to, not including, "
            f"{text(CEILING)}; install one: pip install 'mlx-lm>={text(FLOOR)},<{text(CEILING)}'"
        )
    # An unknown, newer mlx-lm needs at least the mlx of the newest known mlx-lm.
    pair = [pair for pair in PAIRS if pair.mlx_lm <= found_lm][-1]
    if found_mlx < (oldest := pair.oldest_here):
        why = "the pair does not serve"
        if found_mlx >= pair.oldest_mlx:
            why = "this mlx computes wrongly on some Macs, and GPU errors end the process"
        raise UnsupportedVersion(
            f"found mlx-lm {mlx_lm} with mlx {mlx}, expected mlx {text(oldest)} or newer: {why}; "
            f"install one: pip install 'mlx>={text(oldest)}'"
        )


def found_and_known() -> str:
    """Return the installed versions and the versions that are known to work, in one line."""
    found = f"found mlx-lm {installed('mlx-lm')} with mlx {installed('mlx')}"
    return f"{found}; known to work: {', '.join(map(str, PAIRS))}"


def is_known(mlx_lm: str, mlx: str) -> bool:
    """Whether this pair was measured; a version with a suffix (.dev1, rc1, +abc) was not."""
    return all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in (mlx_lm, mlx)) and any(
        pair.mlx_lm == parse(mlx_lm) and pair.oldest_here <= parse(mlx) <= pair.newest_mlx
        for pair in PAIRS
    )


def is_measured() -> bool:
    """Whether the installed pair was measured.

    Both must be releases from a package index: a git snapshot can carry the number of a release.
    """
    return is_known(installed("mlx-lm"), installed("mlx")) and not any(
        metadata.distribution(name).read_text("direct_url.json") for name in ("mlx-lm", "mlx")
    )


def installed(distribution: str) -> str:
    """Return an installed version; raises UnsupportedVersion if it is missing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        raise UnsupportedVersion(
            f"{distribution} is not installed in this environment; "
            f"install it: pip install {distribution}"
        ) from None


def parse(version: str) -> Version:
    """Return the first three numbers of a version; any suffix is ignored."""
    major, minor, patch = [*map(int, re.findall(r"\d+", version)), 0, 0, 0][:3]
    return major, minor, patch


def text(version: Version) -> str:
    return ".".join(str(n) for n in version)
