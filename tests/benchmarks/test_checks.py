"""A benchmark run ends if a server does not behave as its side requires."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import decode, servers, shared, stall, start, streams, together, ttft
from benchmarks.checks import (
    SERVED,
    Expected,
    WrongMeasurement,
    check_kept,
    check_outcome,
    from_disk,
    new,
    repeated,
    reused,
)
from benchmarks.models import BenchmarkModel
from benchmarks.report import Report
from benchmarks.run_all import STEPS
from benchmarks.runs import BOTH, Run
from benchmarks.servers import (
    BEFORE,
    OURS,
    OURS_16,
    REPOSITORY,
    SIDES,
    BenchmarkServer,
    before_side,
)
from mlx_lm_kvpersist.api.admin import REQUESTS_PATH, SPEC_PATH, STATS_PATH
from tests.support import Reply, make_zoo_model
from tests.support.synthetic import Message, make_tiny_model

GROUP = {"kind": "full", "bits": "k8rv4rb64", "why_not_quantized": None}
SPEC = {"kept": True, "precision": "keys 8 bits, values 4", "groups": [GROUP]}
MEASURED: dict[str, Callable[[Run], None]] = {
    "ttft": lambda run: ttft.measure(run, {512: 1}),
    "decode": lambda run: decode.measure(run, {512: (1,)}, 1, 8),
    "together": lambda run: together.measure(run, 300, BOTH, 1),
    "stall": lambda run: stall.measure(run, 512, 1),
    "streams": lambda run: streams.measure(run, 4, 1),
    "start": lambda run: start.measure(run, 1),
}


def test_these_tests_cover_every_benchmark() -> None:
    assert MEASURED.keys() == STEPS.keys() - {"store"}, "the store is measured without a server"


def test_the_precision_of_a_side_passes() -> None:
    check_kept("ours", SPEC, "k8v4")
    full = {**GROUP, "bits": None}
    check_kept("ours-16", {**SPEC, "groups": [full]}, "16")
    window = {**GROUP, "kind": "window", "bits": None}
    check_kept("ours", {**SPEC, "groups": [window, GROUP]}, "k8v4")


@pytest.mark.parametrize(
    ("bits", "groups"),
    [
        pytest.param("k8v4", [GROUP, {**GROUP, "bits": "4b64"}], id="one layer in 4 bits"),
        pytest.param("k8v4", [GROUP, {**GROUP, "bits": None}], id="one layer in full precision"),
        pytest.param("16", [GROUP], id="quantized, full precision expected"),
        pytest.param("k8v4", [{**GROUP, "kind": "window"}], id="no layer that grows"),
        pytest.param("k8v4", [], id="no layer"),
    ],
)
def test_an_unexpected_precision_ends_the_run(bits: str, groups: list[dict[str, Any]]) -> None:
    with pytest.raises(WrongMeasurement, match="the run ends: ours stores"):
        check_kept("ours", {**SPEC, "groups": groups}, bits)


def test_a_refused_model_ends_the_run() -> None:
    with pytest.raises(WrongMeasurement, match="refuses the model: layer 0"):
        check_kept("ours", {"kept": False, "why_not": "layer 0 has a LayerCache"}, "k8v4")


RAM, DISK = {"outcome": "EXACT", "tier": "ram"}, {"outcome": "EXACT", "tier": "disk"}
COLD = {"outcome": "MISS", "tier": "cold"}


@pytest.mark.parametrize(
    ("expected", "n_reused", "outcome"),
    [
        (new(), 0, COLD),
        (new(), 20, {"outcome": "DIVERGE", "tier": "ram"}),
        (reused(900), 999, RAM),
        (repeated(1000), 768, {"outcome": "DIVERGE", "tier": "ram"}),
        (from_disk(900), 999, DISK),
        (SERVED, 0, COLD),
        (new(), 0, None),
        (reused(900), 900, None),
    ],
)
def test_an_expected_outcome_passes(
    expected: Expected, n_reused: int, outcome: dict[str, str] | None
) -> None:
    check_outcome("ours", expected, n_reused, outcome)


@pytest.mark.parametrize(
    ("expected", "n_reused", "outcome", "problem"),
    [
        (new(), 500, RAM, "500 tokens were reused, at most 64 expected"),
        (new(), 0, {"outcome": "STOCK", "tier": "cold"}, "outcome is STOCK"),
        (new(), 0, {}, "outcome is none"),
        (reused(900), 899, RAM, "at least 900 expected"),
        (reused(900), 999, DISK, "tier is disk, not ram"),
        (reused(900), 999, {"outcome": "STOCK", "tier": "ram"}, "outcome is STOCK"),
        (repeated(1000), 700, {"outcome": "DIVERGE", "tier": "ram"}, "at least 743 expected"),
        (from_disk(900), 999, RAM, "tier is ram, not disk"),
        (from_disk(900), 0, COLD, "at least 900 expected"),
        (SERVED, 0, {"outcome": "STOCK"}, "outcome is STOCK"),
        (SERVED, 0, {}, "outcome is none"),
        (new(), 500, None, "at most 64 expected"),
        (reused(900), 0, None, "at least 900 expected"),
    ],
)
def test_an_unexpected_outcome_ends_the_run(
    expected: Expected, n_reused: int, outcome: dict[str, str] | None, problem: str
) -> None:
    with pytest.raises(WrongMeasurement, match=f"^the run ends: on the side ours, .*{problem}"):
        check_outcome("ours", expected, n_reused, outcome)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Start no processes: servers answer with JSON by path, and with the outcome "measured".

    The warm-up prompt always has the expected outcome.
    """
    answers = {SPEC_PATH: json.dumps(SPEC), "measured": "outcome=MISS; tier=cold"}
    stats = {"store": {"tiers": {"disk": {"written_bytes": 0}}, "turns_saved": 0}}
    stats["store"]["queue"] = {"tasks": 0}

    def request(self: BenchmarkServer, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        answer = answers.get(path, json.dumps(stats))
        if path == SPEC_PATH and self.side.name == OURS_16:
            answer = json.dumps({**SPEC, "groups": [{**GROUP, "bits": None}]})
        return 200, {}, answer.encode()

    def chat(self: BenchmarkServer, messages: list[Message], **options: Any) -> Reply:
        is_warm_up = messages[0]["content"].startswith("Warm up")
        outcome = "outcome=MISS; tier=cold" if is_warm_up else answers["measured"]
        usage = {"prompt_tokens": 100, "completion_tokens": 2}
        return Reply("a", "length", usage, {"x-kvpersist": outcome}, 0.1, 0.1, {})

    def events(self: BenchmarkServer, path: str, body: Any) -> Iterator[tuple[str, str]]:
        while True:
            time.sleep(0.001)
            yield "message", "{}"

    for name, function in (("request", request), ("chat", chat), ("events", events)):
        monkeypatch.setattr(BenchmarkServer, name, function)
    monkeypatch.setattr(BenchmarkServer, "start", lambda self: self.log_path.touch())
    monkeypatch.setattr(BenchmarkServer, "stop", lambda self: None)
    monkeypatch.setattr(BenchmarkServer, "cpu_s", lambda self: None)
    monkeypatch.setattr(stall, "_ALONE_S", 0.01)
    monkeypatch.setattr(servers, "_QUIET_S", 0.0)
    return answers


def test_settle_waits_until_nothing_is_queued_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stats(tasks: int, written: int) -> dict[str, Any]:
        disk = {"disk": {"written_bytes": written}}
        return {"store": {"tiers": disk, "turns_saved": 0, "queue": {"tasks": tasks}}}

    answers = iter([stats(1, 10), stats(1, 10), stats(0, 20), stats(0, 20), stats(0, 30)])
    monkeypatch.setattr(servers, "_QUIET_S", 0.0)
    monkeypatch.setattr(BenchmarkServer, "get", lambda self, path: next(answers))
    BenchmarkServer(tmp_path, SIDES[OURS], tmp_path).settle()
    assert list(answers) == [stats(0, 30)]


EVERY_BENCHMARK = pytest.mark.parametrize("name", MEASURED)


@EVERY_BENCHMARK
def test_a_refused_model_ends_every_benchmark(name: str, run: Run, answers: dict[str, str]) -> None:
    answers[SPEC_PATH] = json.dumps({"kept": False, "why_not": "layer 0 has a LayerCache"})
    with pytest.raises(WrongMeasurement, match="ours refuses the model: layer 0"):
        MEASURED[name](run)


@EVERY_BENCHMARK
def test_an_unexpected_precision_ends_every_benchmark(
    name: str, run: Run, answers: dict[str, str]
) -> None:
    answers[SPEC_PATH] = json.dumps({**SPEC, "groups": [{**GROUP, "bits": None}]})
    with pytest.raises(WrongMeasurement, match="ours stores layers in full precision, not in k8v4"):
        MEASURED[name](run)


@EVERY_BENCHMARK
@pytest.mark.parametrize("outcome", ["outcome=STOCK; tier=cold", ""], ids=["stock", "none"])
def test_a_request_served_without_the_plugin_ends_every_benchmark(
    name: str, outcome: str, run: Run, answers: dict[str, str]
) -> None:
    answers["measured"] = outcome
    with pytest.raises(WrongMeasurement, match=r"the outcome is (STOCK|none), not"):
        MEASURED[name](run)


@pytest.mark.parametrize("name", ["ttft", "decode", "together", "start"])
def test_a_prompt_that_is_not_reused_ends_the_run(
    name: str, run: Run, answers: dict[str, str]
) -> None:
    """All prompts get the outcome of a new prompt, which is wrong for a second request."""
    with pytest.raises(WrongMeasurement, match="tokens were reused, at least"):
        MEASURED[name](run)


def test_a_pending_outcome_is_read_from_the_request_records(
    run: Run, answers: dict[str, str], tmp_path: Path
) -> None:
    server = BenchmarkServer(run.model.path, SIDES[OURS], tmp_path)
    headers = {"x-kvpersist": "outcome=PENDING", "x-kvpersist-request": "b"}
    reply = Reply("", "length", {}, headers, 0.0, 0.0, {})
    record = {"id": "b", "outcome": "EXACT", "tier": "disk"}
    answers[REQUESTS_PATH] = json.dumps([{"id": "a", "outcome": "MISS"}, record])
    assert server.outcome(reply)["tier"] == "disk"
    answers[REQUESTS_PATH] = "[]"
    with pytest.raises(WrongMeasurement, match="ours has no record of b"):
        server.outcome(reply)


@pytest.mark.parametrize("name", ["ttft", "decode", "together", "start"])
def test_before_is_measured_as_often_as_ours(
    name: str, run: Run, answers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`before` has as many samples of each row as `ours`; without --before it has none."""

    def ask(server: BenchmarkServer, messages: list[Message], *_: Any) -> Reply:
        usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 900}}
        return Reply("a", "length", usage, {}, 0.1, 0.1, {}, times_s=[0.1, 1.0])

    monkeypatch.setattr(BenchmarkServer, "ask", ask)
    monkeypatch.setattr(BenchmarkServer, "terminate", lambda server, timeout_s: None)
    monkeypatch.setattr(decode, "_measure_memory", lambda *_: None)
    added: list[tuple[str, str]] = []
    monkeypatch.setattr(
        run.report, "add", lambda question, row, side, unit, value: added.append((row, side))
    )
    MEASURED[name](run)
    our_rows = [row for row, side in added if side == OURS]
    assert our_rows and BEFORE not in {side for _, side in added}
    added.clear()
    run.before = before_side(REPOSITORY)
    MEASURED[name](run)
    for side in (OURS, BEFORE):
        assert [row for row, row_side in added if row_side == side] == our_rows


def shared_stats(n_waiting: int) -> str:
    tiers = {"disk": {"written_bytes": 0}, "shared": {"waiting": n_waiting}}
    return json.dumps({"store": {"tiers": tiers, "turns_saved": 0, "queue": {"tasks": 0}}})


def test_a_prompt_missing_from_the_shared_store_ends_the_run(
    run: Run, answers: dict[str, str]
) -> None:
    """The server with the shared store computes the prompt."""
    answers[STATS_PATH] = shared_stats(0)
    with pytest.raises(WrongMeasurement, match="shared store is not: 0 tokens were reused, at l"):
        shared.measure(run, "folder", "/shared", [run.prompts.of_length(512, 1)])


def test_the_run_waits_until_all_blocks_are_put(
    run: Run, answers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers[STATS_PATH] = shared_stats(1)
    monkeypatch.setattr(shared, "_PUT_TIMEOUT_S", 0.1)
    with pytest.raises(AssertionError, match="all blocks in the shared store"):
        shared.measure(run, "folder", "/shared", [run.prompts.of_length(512, 1)])


def test_only_ours_has_the_shared_store(
    run: Run, answers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server puts all prompts into it. Then `ours` and `computed` take turns."""
    requests: list[tuple[str, bool, str | None]] = []

    def ask(server: BenchmarkServer, messages: list[Message], n: int, expected: Expected) -> Reply:
        if not messages[0]["content"].startswith("Warm up"):
            has_shared = "/shared" in server.side.flags
            requests.append((server.side.name, has_shared, expected.tier))
        return Reply("a", "length", {}, {}, 0.1, 0.1, {})

    monkeypatch.setattr(BenchmarkServer, "ask", ask)
    answers[STATS_PATH] = shared_stats(0)
    shared.measure(run, "folder", "/shared", [run.prompts.of_length(512, n) for n in (1, 2)])
    put, ours, computed = (OURS, True, None), (OURS, True, "shared"), (shared.COMPUTED, False, None)
    assert requests == [put, put, ours, computed, computed, ours]
    rows = {(row["what"], row["side"]): row["values"] for row in run.report.content["samples"]}
    assert rows["folder", OURS] == rows["folder", shared.COMPUTED] == [0.1, 0.1]


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["refuses the model", "stores layers in full precision"])
def test_a_real_server_with_an_unsuitable_model_ends_the_run(
    problem: str, tmp_path: Path, report: Report
) -> None:
    if problem == "refuses the model":
        pytest.importorskip("mlx_lm.models.deepseek_v41", reason="newer than this mlx-lm")
        path = make_zoo_model(tmp_path / "model", "deepseek_v41")
    else:
        path = make_tiny_model(tmp_path / "model", head_dim=4)
    with pytest.raises(WrongMeasurement, match=f"the run ends: ours {problem}"):
        ttft.measure(Run(BenchmarkModel("refused", path), report), {512: 1})
    assert report.content["samples"] == []
