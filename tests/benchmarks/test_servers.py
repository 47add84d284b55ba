"""The benchmarks of real servers, small: every state is what its name says."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import mlx_lm_kvpersist
from benchmarks import decode, stall, start, together, ttft
from benchmarks.measured_server import peak_rss_bytes
from benchmarks.page_cache import drop_cached_pages
from benchmarks.runs import Costs, Deadline, Run
from benchmarks.servers import check_kept
from tests.support import Reply


@pytest.mark.slow
def test_first_tokens(run: Run) -> None:
    result = ttft.measure(run, (300,), 1)
    rows = {row["state"]: row for row in result.rows}
    assert list(rows) == ["cold", "hot", "extend", "restart, disk", "restart, cache"]
    reused = {state: (row["ours reused"], row["stock reused"]) for state, row in rows.items()}
    assert max(reused["cold"]) < 8, "no more than the template's first tokens"
    assert reused["hot"] == (299, 299)
    assert reused["extend"][0] > 300, "ours goes on behind the reply"
    assert reused["restart, disk"][0] > 300 and reused["restart, disk"][1] < 8
    assert reused["restart, cache"][0] > 300 and reused["restart, cache"][1] is None
    assert rows["restart, disk"]["outcome"] == "EXACT"
    assert all(row["ours s"] > 0 for row in result.rows)
    kept = json.loads(result.path.read_text(encoding="utf-8"))
    assert kept["rows"] == result.rows
    assert kept["model"]["fingerprint"]
    assert kept["setting"]["sides"].keys() == {"ours", "stock"}
    assert kept["setting"]["page cache left after dropping"] in (0.0, None)


@pytest.mark.slow
def test_the_code_of_another_checkout_runs_beside_ours(run: Run, tmp_path: Path) -> None:
    """Its package notes that it was imported, and becomes ours."""
    package = tmp_path / "checkout" / "mlx_lm_kvpersist"
    package.mkdir(parents=True)
    ours = Path(mlx_lm_kvpersist.__file__)
    (package / "__init__.py").write_text(
        f"open({str(tmp_path / 'imported')!r}, 'w').close()\n"
        f"__path__ = [{str(ours.parent)!r}]\nexec(open({str(ours)!r}).read())\n"
    )
    run.sides, run.before = ("ours", "before"), tmp_path / "checkout"
    with run.fleet() as fleet:
        assert fleet.sides["before"].flags == fleet.sides["ours"].flags
        assert (tmp_path / "imported").exists()


@pytest.mark.slow
def test_decoding(run: Run) -> None:
    (row,) = decode.measure(run, (200,), (2,), 1, 12).rows
    assert row["ours tokens/s"] > 0 and row["stock tokens/s"] > 0
    # Of 32 bits: keys 6, values 4, and a scale and a bias in 64 numbers, of 16 bits each.
    assert row["ours KV MB by shape"] / row["stock KV MB by shape"] == pytest.approx(5.5 / 32)
    for side in ("ours", "stock"):
        assert row[f"{side} RSS MB"] > row[f"{side} peak MB"] > 1


@pytest.mark.slow
def test_requests_that_arrive_together(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "CONTEXT", 300)
    monkeypatch.setattr(together, "SYSTEM", 600)
    rows = together.measure(run, ("turns", "agents"), 1).rows
    found = {(row["what"], row["side"]): row for row in rows}
    assert len(found) == 4
    assert all(row["last first token s"] <= row["total s"] for row in rows)
    assert all(row["first token s"] <= row["last first token s"] for row in rows)
    assert (
        found["turns", "ours"]["reused"] > 300 and found["turns", "stock"]["total s / stock"] == 1
    )
    assert found["agents", "ours"]["reused"] > 500


@pytest.mark.slow
def test_a_client_beside_others(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "_QUIET_S", 0.3)
    rows = stall.measure(run, 400, 1).rows
    found = {(row["side"], row["while"]): row for row in rows}
    for side in ("ours", "stock"):
        alone = found[side, stall.QUIET]
        assert found[side, stall.COLD]["max ms"] > alone["p95 ms"]
        assert alone["slowdown"] == 0
    restored = found["ours", stall.RESTORED]["max ms"]
    assert restored < found["stock", stall.RESTORED]["max ms"]


@pytest.mark.slow
def test_a_first_conversation(run: Run, tmp_path: Path) -> None:
    *turns, short = start.measure_conversation(run, tmp_path, 1, 1.0).rows
    assert [row["turn"] for row in turns] == [1, 2, 3, 4, 5, 6]
    assert turns[0]["ours reused"] == turns[0]["stock reused"] == 0
    for before, row in pairwise(turns):
        assert row["ours reused"] >= before["ours prompt"] >= row["stock reused"] / 2 > 0
    assert short["ours first token s"] > 0 and short["stock first token s"] > 0


def test_a_model_that_is_not_kept_by_default_is_not_measured() -> None:
    """A server that refuses a model is stock's twin, and nobody sees that in its times."""
    group = {"kind": "full", "bits": "k8rv4rb64", "why_not_quantized": None}
    spec = {"kept": True, "precision": "keys 8 bits, values 4", "groups": [group]}
    check_kept(spec, "k8v4")
    full = {**group, "bits": None, "why_not_quantized": "a head of 20 numbers"}
    for other in ({**group, "bits": "4b64"}, full):
        with pytest.raises(SystemExit, match="not in k8v4"):
            check_kept({**spec, "groups": [group, other]}, "k8v4")
        check_kept({**spec, "groups": [group, other]})
    with pytest.raises(SystemExit, match="is not kept: layer 0"):
        check_kept({"kept": False, "why_not": "layer 0 has a LayerCache"})


def test_no_time_left_is_said(run: Run) -> None:
    run.deadline = Deadline(0)
    assert ttft.measure(run, (300,), 1).content["left_out"] == ["ttft at 300"]


def test_costs_are_learned_from_what_was_computed() -> None:
    costs = Costs()

    def reply(n_cached: int, total_s: float) -> Reply:
        usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": n_cached}}
        return Reply("", "length", usage, {}, 0.0, total_s, {})

    costs.learn(reply(90, 50.0))
    assert costs.of(1000) == 0
    costs.learn(reply(20, 4.0))
    costs.learn(reply(0, 1.0))
    assert costs.of(1000) == 50


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no posix_fadvise")
def test_dropping_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    left = drop_cached_pages([path])
    assert left is not None and left < 0.1
    assert drop_cached_pages([]) is None


def test_peak_of_the_process() -> None:
    assert peak_rss_bytes() > 10 << 20
