"""The table of what a turn writes says what is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tool_turns import MAX_LOSS_S, MODELS, hold
from tools.docs.disk import TOKENS_PER_S, spec_of, turn_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_turn_writes_what_the_table_says(name: str, tmp_path: Path) -> None:
    spec, n_turns = spec_of(name), 12
    in_a_row, _, all_written = turn_bytes(spec)
    for max_loss_s, expected in ((MAX_LOSS_S, in_a_row), (0.0, all_written)):
        written, _ = hold(name, tmp_path / f"{max_loss_s}", n_turns, max_loss_s, TOKENS_PER_S)
        assert written.bytes_of(spec) / n_turns == pytest.approx(expected, rel=0.1)
