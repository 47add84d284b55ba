"""The store benchmark: its rows, and the faults that end a run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from mlx_lm.utils import load_model

from benchmarks import store
from benchmarks.checks import WrongMeasurement
from benchmarks.models import BenchmarkModel
from benchmarks.page import make_page
from benchmarks.report import DeviceResults, Report
from benchmarks.runs import BOTH, Run
from mlx_lm_kvpersist.cache.geometry.spec import probe_model
from mlx_lm_kvpersist.config import DEFAULT_BITS, KV_BITS
from mlx_lm_kvpersist.store.block_store import BlockStore
from tests.support import make_zoo_model


def test_store_benchmark_measures_saves_loads_restores_and_bytes(run: Run) -> None:
    store.measure(run, 768, 2)
    results = DeviceResults("", [run.report.content])
    rows = ("save", "load, cold", "load, warm", "restore, cold", "restore, warm")
    for row in rows:
        for side in BOTH:
            values = results.values(store.QUESTION, row, side)
            assert len(values) == 2 and min(values) > 0
    spec = probe_model(load_model(run.model.path, lazy=True)[0], KV_BITS[DEFAULT_BITS])
    (kv_mb,) = results.values(store.QUESTION, "bytes on disk", "stock")
    assert kv_mb == 768 * spec.bytes_per_token / 1e6, "in the default precision"
    assert results.values(store.QUESTION, "bytes on disk", "ours")[0] > kv_mb
    run.report.content["model"] = run.model.about()
    page = make_page([results])
    assert "## Store" in page and "| restore, cold | ours | s |" in page


def test_blocks_that_are_not_read_from_disk_end_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the save, each store is opened in an empty folder."""
    real_opened, n_opened = store.opened, 0

    def opened(folder: Path, max_ram_bytes: int) -> closing[BlockStore]:
        nonlocal n_opened
        n_opened += 1
        return real_opened(folder if n_opened == 1 else folder / "empty", max_ram_bytes)

    monkeypatch.setattr(store, "opened", opened)
    with pytest.raises(WrongMeasurement, match="did not read all blocks from disk"):
        store.measure(run, 512, 1)


def test_an_incomplete_restore_ends_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.Work, "_load", lambda work: 1.0)
    monkeypatch.setattr(store, "Prompt", lambda ids, segments, types: _cut_prompt(ids))
    with pytest.raises(WrongMeasurement, match="256 of 512 tokens were restored"):
        store.measure(run, 512, 1)


def _cut_prompt(ids: list[int]) -> object:
    from mlx_lm_kvpersist.host.hooks import Prompt

    cut = [*ids[:256], *range(64)]
    return Prompt(cut, [cut], ["user"])


def test_a_model_with_windows_is_refused(tmp_path: Path, report: Report) -> None:
    path = make_zoo_model(tmp_path / "model", "gemma3_text")
    with pytest.raises(WrongMeasurement, match="gemma has layers with windows or states"):
        store.measure(Run(BenchmarkModel("gemma", path), report), 512, 1)
