"""What the store may use: free space."""

from __future__ import annotations

import shutil
from pathlib import Path

from mlx_lm_kvpersist.store.budget import Space, free_bytes


def test_free_space_is_mentioned_once_it_is_below_the_floor() -> None:
    """A volume that has just the space to leave is not short of it."""
    store = Path("/store")
    enough = Space(store, 0, 2 << 30, 5 << 30, 5 << 30)
    assert str(enough) == "/store (0 B of 2.0 GiB, 5.0 GiB free)"
    assert str(Space(store, 0, 2 << 30, (5 << 30) - 1, 5 << 30)) == (
        "/store (0 B of 2.0 GiB, 5.0 GiB free; "
        "less than the 5.0 GiB of --kvpersist-min-free, so nothing new is stored)"
    )


def test_free_space_is_that_of_the_volume(tmp_path: Path) -> None:
    assert 0 < free_bytes(tmp_path) <= shutil.disk_usage(tmp_path).total
