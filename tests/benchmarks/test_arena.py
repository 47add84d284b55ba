"""What docs/architecture.md says of an arena with views is so with this MLX."""

from __future__ import annotations

import random
from pathlib import Path

import mlx.core as mx
import pytest

from benchmarks import arena, pool


def test_an_update_beside_a_view_copies_the_arena_and_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "REPEATS", 1)
    n_blocks = 48
    rows = {row["what"]: row for row in arena.measure_all(tmp_path, [n_blocks]).rows}
    whole = n_blocks * arena.new_block().nbytes / 2**20
    for what in ("put a block", "append a token"):
        assert rows[what]["arena MiB"] == rows[what]["blocks MiB"] == 0
        beside = rows[f"{what}, a conversation being read"]
        assert (beside["arena MiB"], beside["blocks MiB"]) == (whole, 0)
    assert rows["get a conversation that adjoins"]["arena MiB"] == 0
    assert rows["evict all"]["blocks give back, MiB"] == pytest.approx(whole, abs=1)


def test_both_hold_the_same() -> None:
    made, blocks = arena.Arena(40), arena.Blocks(40)
    for place, block in blocks.held.items():
        made.put(place, block)
    places = random.Random(1).sample(range(40), arena.CONVERSATION)
    assert mx.array_equal(made.gather(places), blocks.join(places))
    adjoining = range(5, 5 + arena.CONVERSATION)
    assert mx.array_equal(made.view(5), blocks.join(adjoining))


def test_room_lies_apart_only_where_it_can() -> None:
    assert arena.churned(64, 1, random.Random(1))["room lay apart, % of conversations"] == 0
    assert arena.churned(64, 16, random.Random(1))["room lay apart, % of conversations"] > 10


def test_the_pool_is_measured_full_and_with_room(tmp_path: Path) -> None:
    rows = pool.measure_all(tmp_path, [1000]).rows
    assert [row["conversations"] for row in rows] == ["apart", "together"]
    assert all(row["blocks"] == 1000 for row in rows)
    assert all(value >= 0 for row in rows for value in list(row.values())[2:])
