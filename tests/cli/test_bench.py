"""`bench` stays within its time, and its table says what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlx_lm import utils

from mlx_lm_kvpersist.cli import bench
from mlx_lm_kvpersist.cli.bench import LENGTHS, Side, StockSpeed, as_markdown, plan, row
from mlx_lm_kvpersist.cli.demo import make_model
from mlx_lm_kvpersist.cli.main import main
from mlx_lm_kvpersist.cli.servers import Reply
from mlx_lm_kvpersist.errors import KVPersistError


def plan_at_speed(
    tmp_path: Path, tokens_per_s: float, minutes: float = 5, load_s: float = 5
) -> Any:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 131072}')
    return plan(str(tmp_path), StockSpeed(load_s, tokens_per_s, 30.0, 3.0), 60 * minutes, 0.0)


@pytest.mark.parametrize(
    ("tokens_per_s", "expected"),
    [
        (1e6, (16384, 3)),
        (400, (8192, 3)),
        (150, (2048, 3)),
        (60, (4096, 1)),
        (30, (2048, 1)),
        (8, (512, 1)),
    ],
)
def test_prompts_are_as_long_as_the_time_allows(
    tmp_path: Path, tokens_per_s: float, expected: tuple[int, int]
) -> None:
    n_tokens, n_conversations = plan_at_speed(tmp_path, tokens_per_s)
    assert (n_tokens, n_conversations) == expected
    computing_s = 3 * n_conversations * n_tokens / tokens_per_s
    assert computing_s < 5 * 60 - 3 * 5 - 2 * 5


def test_more_time_gives_longer_prompts(tmp_path: Path) -> None:
    n_tokens = [plan_at_speed(tmp_path, 200, minutes)[0] for minutes in (2, 5, 20, 60)]
    assert n_tokens == sorted(n_tokens) and n_tokens[0] < n_tokens[-1] == LENGTHS[-1]


def test_prompts_fit_into_the_models_context(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 2048}')
    assert plan(str(tmp_path), StockSpeed(1.0, 1e6, 30.0, 3.0), 300.0, 0.0) == (1024, 3)


def test_refusal_on_a_slow_machine_states_the_minutes_needed(tmp_path: Path) -> None:
    with pytest.raises(KVPersistError, match=r"computes 1 tokens .* give --minutes (\d+)") as error:
        plan_at_speed(tmp_path, 1.0)
    needed = int(str(error.value).partition("--minutes ")[2].partition(",")[0])
    assert plan_at_speed(tmp_path, 1.0, minutes=needed) == (256, 1)


def test_conversation_alternates_user_and_assistant_messages() -> None:
    """Templates of many models refuse two questions in a row."""
    reply = Reply("It is old.", 0.1, 10, 0, "", 3, 0.1)
    server: Any = SimpleNamespace(chat=lambda *args: reply)
    side = Side("stock", server)
    side.converse(["A story."])
    (messages,) = side.messages
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert messages[0]["content"].startswith("A story.\n\nWho was")


def test_wrong_options_are_refused_before_measuring_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "measured", lambda *_: pytest.fail("something is started"))
    for argv, expected in (
        (["--model", "/no/such"], "the model folder /no/such does not exist"),
        (["--model", ".", "--minutes", "0.5"], "--minutes 0.5 is too short; give 1 or more"),
        (["--model", ".", "--minutes", "nan"], "--minutes nan is too short; give 1 or more"),
        (["--model", ".", "--json", f"{tmp_path}/no/b.json"], "there is no folder for"),
        (["--model", ".", "--json", str(tmp_path)], "is a folder; name a file in it"),
        (["--model", "not a name"], "the model folder not a name does not exist"),
    ):
        assert main(["bench", *argv]) == 1
        assert expected in capsys.readouterr().err


def test_times_as_fast_is_above_one_if_kvpersist_is_faster() -> None:
    result = row("first token", "s", [2.0, 8.0, 4.0], [1.0, 2.0, 4.0])
    assert (result["stock"], result["kvpersist"], result["times_as_fast"]) == (4.0, 2.0, 2.0)
    result = row("reply", "tokens/s", [50.0], [40.0], more_is_better=True)
    assert result["times_as_fast"] == 0.8


CONTENT: dict[str, Any] = {
    "date": "2026-11-22T10:00:00+00:00",
    "seconds": 250,
    "versions": {"python": "3.12.1", "mlx": "9.1", "mlx-lm": "9.2", "mlx-lm-kvpersist": "9.3"},
    "device": {
        "device_name": "Some chip",
        "memory_size": 64 << 30,
        "kind": "gpu",
        "platform": "macOS-15",
        "processors": 12,
    },
    "cpu_gflops": None,
    "load_before": 0.5,
    "model": {"name": "some/model", "type": "llama", "weights": "4.2 GiB", "weight_bits": 4},
    "kv": {"kept": True, "layout": "4rb64"},
    "setting": {"prompt_tokens": 8190, "conversations": 3},
    "rows": [
        row("first token", "s", [2.0], [0.5], reused=(0, 8100)),
        row("reply", "tokens/s", [40.0], [50.0], more_is_better=True),
    ],
}


def test_table_has_versions_device_model_and_settings() -> None:
    text = as_markdown(CONTENT)
    for expected in (
        *("mlx-lm-kvpersist 9.3, mlx-lm 9.2, mlx 9.1, Python 3.12.1", "Some chip, gpu, 64.0 GiB"),
        *(
            "some/model (llama, 4-bit, 4.2 GiB)",
            "precision of kvpersist: keys 4 bits, values 4, rotated\n",
            "8,190 tokens, 3 of each",
        ),
        *("| first token | 2 s | 0.5 s | 4 | 8,100 tokens |", "took 250 s"),
        "| reply | 40 tokens/s | 50 tokens/s | 1.25 |  |",
    ):
        assert expected in text
    assert ", gpu, 64.0 GiB, 74 GFLOP/s, macOS" in as_markdown({**CONTENT, "cpu_gflops": 74.04})
    assert "nothing is kept (no)" in as_markdown({**CONTENT, "kv": {"why_not": "no"}})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bench_reports_reuse_of_cold_hot_and_restarted_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real command: four starts, two of them after SIGKILL."""
    model, file = make_model(tmp_path / "model"), tmp_path / "bench.json"
    assert main(["bench", "--model", str(model), "--minutes", "2", "--json", str(file)]) == 0
    captured = capsys.readouterr()
    content = json.loads(file.read_text())
    assert captured.out.strip() == as_markdown(content)
    cold, hot, restarted, reply, start = content["rows"]
    n_tokens = content["setting"]["prompt_tokens"]
    assert n_tokens >= 200 and max(cold["reused"].values()) < 40, "the template's beginning"
    assert hot["reused"]["kvpersist"] > n_tokens and hot["reused"]["stock"] > 0.9 * n_tokens
    assert restarted["reused"]["kvpersist"] > n_tokens and restarted["reused"]["stock"] < 40
    assert restarted["times_as_fast"] > 2
    assert reply["kvpersist"] > 0 and start["kvpersist"] > 0
    assert "stock: start …" in captured.err and bench.RESTARTED in captured.err


def test_bench_downloads_the_same_files_as_mlx_lm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    downloads: list[tuple[str, list[str]]] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        downloads.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(bench, "find_on_hub", lambda name: None)
    monkeypatch.setattr(bench, "snapshot_download", download)
    assert bench.fetched("some/model") == tmp_path
    ((name, patterns),) = downloads
    # mlx-lm 0.31.3 does not have this constant.
    stock_patterns = getattr(utils, "DEFAULT_ALLOW_PATTERNS", patterns)
    assert name == "some/model" and set(patterns) == set(stock_patterns)
