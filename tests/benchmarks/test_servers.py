"""The benchmarks with real servers and small prompts: their rows, sides and presets."""

from __future__ import annotations

import json
import sys
from ast import literal_eval
from pathlib import Path
from typing import Any

import pytest

import mlx_lm_kvpersist
from benchmarks import decode, run_all, shared, stall, start, streams, together, ttft
from benchmarks.models import BenchmarkModel
from benchmarks.page_cache import drop_cached_pages
from benchmarks.report import Report
from benchmarks.runs import BOTH, Run
from benchmarks.servers import (
    BEFORE,
    OURS,
    OURS_16,
    REPOSITORY,
    SIDES,
    STOCK,
    Fleet,
    before_side,
)
from tests.support import ServerError, make_tiny_model


def values(run: Run) -> dict[tuple[str, str], list[float]]:
    """Return the samples that are saved on disk, by row and side."""
    saved = json.loads(run.report.path.read_text(encoding="utf-8"))
    return {(row["what"], row["side"]): row["values"] for row in saved["samples"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_ranks", "name", "one_by_one", "fleets"),
    [
        (1, "512", False, [[*BOTH]]),
        (1, "512", True, [[side] for side in BOTH]),
        (2, "512, 2 ranks", False, [[*BOTH]]),
    ],
)
def test_ttft_measures_new_repeated_continued_and_restarted_prompts(
    report: Report,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    n_ranks: int,
    name: str,
    one_by_one: bool,
    fleets: list[list[str]],
) -> None:
    model = make_tiny_model(tmp_path / "model", n_heads=4, n_kv_heads=2)
    run = Run(BenchmarkModel("tiny", model), report)
    started: list[list[str]] = []

    def fleet(self: Run, names: list[str], n_ranks: int) -> Fleet:
        started.append(list(names))
        return original(self, names, n_ranks)

    original = Run.fleet
    monkeypatch.setattr(Run, "fleet", fleet)
    ttft.measure(run, {512: 2}, n_ranks, n_turns=2, one_by_one=one_by_one)
    assert started == fleets
    samples = values(run)
    states = ("new prompt", "same prompt again", "next turn")
    rows = {(f"{state}, {name}", side) for state in states for side in BOTH}
    assert samples.keys() == {*rows, (f"after a restart, {name}", OURS)}
    assert all(min(row) > 0 for row in samples.values())
    counts = [len(samples[f"{state}, {name}", OURS]) for state in states]
    assert counts == [2, 2 * ttft.N_AGAIN, 2 * 2]
    assert len(samples[f"after a restart, {name}", OURS]) == 2
    assert "page cache" in run.report.content["notes"][ttft.QUESTION]


@pytest.mark.slow
def test_only_before_imports_the_package_of_its_checkout(run: Run, tmp_path: Path) -> None:
    """The checkout's package writes a file when it is imported, and then loads this package.

    The checkout has no other folder, because it may be older than the benchmarks.
    """
    package = tmp_path / "checkout" / "mlx_lm_kvpersist"
    package.mkdir(parents=True)
    ours = Path(mlx_lm_kvpersist.__file__)
    (package / "__init__.py").write_text(
        f"open({str(tmp_path / 'imported')!r}, 'w').close()\n"
        f"__path__ = [{str(ours.parent)!r}]\nexec(open({str(ours)!r}).read())\n"
    )
    run.before = before_side(tmp_path / "checkout")
    with run.fleet([OURS]):
        assert not (tmp_path / "imported").exists()
    with run.fleet([BEFORE]):
        assert (tmp_path / "imported").exists()


def test_before_starts_its_checkout_with_the_options_of_ours(run: Run, tmp_path: Path) -> None:
    """The checkout's package saves its options and exits.

    The checkout's benchmarks are older and have no launcher.
    """
    package = tmp_path / "checkout" / "mlx_lm_kvpersist"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / "checkout" / "benchmarks").mkdir()
    (tmp_path / "checkout" / "benchmarks" / "__init__.py").touch()
    (package / "_startup.py").write_text(
        "import sys\ndef install():\n    pass\ndef serve(argv):\n"
        f"    open({str(tmp_path / 'argv')!r}, 'w').write(repr(argv))\n    sys.exit(3)\n"
    )
    run.before = before_side(tmp_path / "checkout")
    server = run.fleet([BEFORE])[BEFORE]
    with pytest.raises(ServerError, match="3"):
        server.start()
    argv = literal_eval((tmp_path / "argv").read_text())
    ours = [flag.replace("{store}", str(server.store)) for flag in SIDES[OURS].flags]
    assert argv[-len(ours) :] == ours


def test_before_refuses_a_folder_without_the_package(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="it has no mlx_lm_kvpersist"):
        before_side(tmp_path)


def test_run_all_prints_the_ratio_of_ours_to_before(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measure(run: Run) -> None:
        for side, value in zip(run.sides(), (3.0, 8.0, 2.0), strict=True):
            run.report.add("first token", "new prompt, 1K", side, "s", value)

    preset = run_all.Preset(str(tiny_model), (run_all.Step("ttft", {}),))
    monkeypatch.setitem(run_all.PRESETS, "smoke", preset)
    monkeypatch.setattr(run_all, "STEPS", {"ttft": measure})
    arguments = ["--preset", "smoke", "--before", str(REPOSITORY), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["run_all", *arguments])
    run_all.main()
    output = capsys.readouterr().out
    assert "| question | row | unit | before | ours | ours / before |" in output
    assert "| first token | new prompt, 1K | s | 2 | 3 | 1.5 |" in output
    saved = json.loads((tmp_path / "smoke.json").read_text())
    assert "(commit " in saved["sides"][BEFORE], "the file says what before is"


@pytest.mark.slow
def test_decode_measures_speed_and_memory(run: Run) -> None:
    # Stock may answer for half a second before it accepts the second request.
    decode.measure(run, {512: (2,)}, 1, 1536)
    samples = values(run)
    assert samples["2 of 512", OURS][0] > 0 and samples["2 of 512", STOCK][0] > 0
    memory = {row["side"]: row for row in run.report.content["samples"] if row["unit"] == "MB"}
    # Two layers of one key head of 64 float32 numbers, and two replies of 1,536 tokens.
    assert memory[STOCK]["values"] == [2 * (512 - 192 + 1536) * 2 * 2 * 64 * 4 / 1e6]
    assert memory[OURS]["values"][0] > 0


@pytest.mark.slow
def test_together_measures_simultaneous_requests(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "CONTEXT", 300)
    together.measure(run, 600, BOTH, 2)
    samples = values(run)
    sides = (OURS, OURS_16, STOCK)
    assert all(len(samples[together.ALL_TURNS, side]) == 2 for side in sides)
    assert all(samples[together.LAST, side][0] > 0 for side in BOTH)


@pytest.mark.slow
def test_stall_measures_the_longest_pause_of_a_reply(run: Run) -> None:
    stall.measure(run, 600, 1)
    assert all(0 < pauses[0] < 60 for pauses in values(run).values())


@pytest.mark.slow
def test_shared_measures_prompts_of_a_shared_folder(run: Run, tmp_path: Path) -> None:
    prompts = [run.prompts.of_length(600, n) for n in (1, 2)]
    shared.measure(run, "folder", str(tmp_path / "shared"), prompts)
    samples = values(run)
    assert all(len(row) == 2 for row in samples.values())
    assert min(samples["folder", OURS]) > 0 and min(samples["folder", shared.COMPUTED]) > 0
    assert min(samples["folder, reused", OURS]) >= 600 - 256
    assert samples["folder, reused", shared.COMPUTED] == [0, 0]


def test_a_pause_counts_if_it_overlaps_the_interval() -> None:
    reply = stall.RunningReply.__new__(stall.RunningReply)
    reply.times = [0.0, 1.0, 4.0, 5.0, 9.0]
    assert reply.longest_gap_s(2.0, 4.5) == 3.0
    assert reply.longest_gap_s(4.5, 5.5) == 4.0
    with pytest.raises(RuntimeError, match="no token"):
        reply.longest_gap_s(9.5, 10.0)


@pytest.mark.slow
def test_streams_and_start_measure_their_rows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_SYSTEM_TOKENS", 300)
    streams.measure(run, 16, 2)
    start.measure(run, 1)
    samples = values(run)
    assert len(samples["8 clients, wall time", OURS]) == 2
    for row in (start.FIRST, start.LATER, start.SECOND_TURN):
        assert samples[row, OURS][0] > 0 and samples[row, STOCK][0] > 0


def test_decode_rate_counts_only_simultaneous_replies() -> None:
    from tests.support import Reply

    def reply(*times_s: float) -> Reply:
        return Reply("", "length", {}, {}, 0.0, 0.0, {}, times_s=list(times_s))

    # Both replies run from 1.5 to 3.0, and together have three tokens in that time.
    streams = [(0.0, reply(1.0, 2.0, 3.0, 4.0)), (0.5, reply(1.0, 2.5))]
    assert decode._rate(streams) == pytest.approx(3 / 1.5)
    with pytest.raises(SystemExit, match="did not run at the same time"):
        decode._rate([(0.0, reply(1.0, 2.0)), (0.0, reply(3.0, 4.0))])


def test_preset_steps_are_known_and_gpu_presets_are_complete() -> None:
    for preset in run_all.PRESETS.values():
        assert {step.name for step in preset.steps} <= run_all.STEPS.keys()
    gpu_presets = [preset for name, preset in run_all.PRESETS.items() if name.startswith("gpu-")]
    on_one_gpu = [
        {step.name for step in preset.steps if "n_ranks" not in step.arguments}
        for preset in gpu_presets
    ]
    steps = [name for names in on_one_gpu for name in names]
    assert sorted(steps) == sorted(run_all.STEPS), "the parts are disjoint and complete"


def test_a_preset_runs_the_selected_steps_with_their_arguments(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    preset = run_all.Preset("other", (run_all.Step("ttft", {"a": 1}), run_all.Step("stall", {})))
    monkeypatch.setitem(run_all.PRESETS, "smoke", preset)

    def measure(run: Run, **arguments: Any) -> None:
        calls.append((run.model.name, arguments))

    monkeypatch.setattr(run_all, "STEPS", {"ttft": measure, "stall": measure})
    run_all.measure("smoke", str(tiny_model), out=tmp_path, only=["ttft"])
    assert calls == [(tiny_model.name, {"a": 1})]


def test_ours_has_the_default_precision() -> None:
    assert SIDES[OURS].bits == "k8v4" and "--kvpersist-kv-bits" not in SIDES[OURS].flags


def test_servers_are_spread_over_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = [SIDES[name] for name in (OURS, OURS_16, STOCK)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert _gpus(Fleet(tmp_path, sides)) == [["2"], ["3"], ["2"]]
    assert _gpus(Fleet(tmp_path, sides, n_ranks=2)) == [["2", "3"]] * 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert _gpus(Fleet(tmp_path, sides, n_ranks=2)) == [["0", "1"], ["2", "3"], ["0", "1"]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert _gpus(Fleet(tmp_path, sides)) == [[None]] * 3
    monkeypatch.setattr("benchmarks.servers.device", lambda: {"kind": "gpu"})
    with pytest.raises(SystemExit, match="a multiple of 2 GPUs"):
        Fleet(tmp_path, sides, n_ranks=2)


def _gpus(fleet: Fleet) -> list[list[str | None]]:
    """Return the GPU of each rank, as each server's processes get it."""
    return [
        [server.env_of_rank(rank).get("CUDA_VISIBLE_DEVICES") for rank in range(server.n_ranks)]
        for server in fleet.servers.values()
    ]


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no posix_fadvise")
def test_drop_cached_pages_removes_a_file_from_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    left = drop_cached_pages([path])
    assert left is not None and left < 0.1
    assert drop_cached_pages([]) is None
