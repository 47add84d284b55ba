"""`store prune`: the first objects of a shared store go, and nothing of anybody else."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from mlx_lm_kvpersist.cli.main import main
from mlx_lm_kvpersist.store.objects import Objects


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """Three objects of 1 KiB, 0, 10 and 20 days old, beside a file of somebody else."""
    folder = tmp_path / "bucket"
    objects = Objects(str(folder))
    for n in range(3):
        objects.put(f"kvpersist/aa/{n}", bytes(1024))
        then_s = time.time() - n * 10 * 86400
        os.utime(folder / f"kvpersist/aa/{n}", (then_s, then_s))
    (folder / "letter.txt").write_bytes(bytes(4096))
    return folder


def prune(bucket: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, int]:
    assert main(["store", "prune", str(bucket), "--json", *options]) == 0
    found: dict[str, int] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ((), {"0", "1", "2"}),
        (("--older", "14d"), {"0", "1"}),
        (("--older", "36h"), {"0"}),
        (("--size", "2K"), {"0", "1"}),
        (("--older", "14d", "--size", "1K"), {"0"}),
        (("--size", "0"), set()),
    ],
)
def test_the_first_go(
    bucket: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], left: set[str]
) -> None:
    said = {"removed": 3 - len(left), "removed_bytes": 1024 * (3 - len(left))}
    expected = {**said, "left_bytes": 1024 * len(left)}
    assert prune(bucket, capsys, "--dry-run", *options) == expected
    assert len(list((bucket / "kvpersist/aa").iterdir())) == 3
    assert prune(bucket, capsys, *options) == expected
    assert {path.name for path in (bucket / "kvpersist/aa").iterdir()} == left
    assert (bucket / "letter.txt").exists()
