"""The `quality` command on a tiny model: its measures, its table and its errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

from mlx_lm_kvpersist.cache.measuring import divergence
from mlx_lm_kvpersist.cli import main as cli
from mlx_lm_kvpersist.cli import quality as command
from mlx_lm_kvpersist.cli import quality_checks as checks
from mlx_lm_kvpersist.cli.servers import OWN_TEXT
from mlx_lm_kvpersist.config import DEFAULT_BITS, KV_BITS
from tests.support import make_tiny_model, make_zoo_model

from ..cache.conftest import tiny_llama

SHORT = ("--context", "400")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use few texts and short replies."""
    few = {name: divergence.all_parts()[name] for name in ("context", "English", "far copy")}
    monkeypatch.setattr(divergence, "all_parts", lambda: few)
    monkeypatch.setattr(command, "_TOOL_TOKENS", 20)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The beginning of the package's own text."""
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text(OWN_TEXT.read_text(encoding="utf-8")[:1500], encoding="utf-8")
    return path


def quality(*argv: str | Path) -> int:
    return cli.main(["quality", *map(str, argv)])


@pytest.mark.slow
def test_fewer_bits_cause_more_divergence(
    tiny_model: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--model", tiny_model, "--text", text, *SHORT, "--json")
    assert quality(*argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["text"]["name"] == str(text) and report["reference"] == "float32"
    assert report["text"]["predicted"] == report["text"]["tokens"] - 1
    rows = {row["precision"]: row for row in report["rows"]}
    assert list(rows) == ["16", *(name for name in KV_BITS if name != "16")]
    assert not report["left_out"]
    own, eight, four = rows["16"], rows["8"], rows["4"]
    nothing = {"value": 0.0, "error": 0.0}
    assert (own["divergence_nats"], own["perplexity_rise"]) == (nothing, nothing)
    assert own["agreement"] == {"value": 1.0, "error": 0.0}
    assert own["replies"] == {"tried": 8, "found": None, "same": 8}
    assert own["needles"]["same"] == own["needles"]["tried"] == 3
    assert own["tool_calls"]["same"] == own["tool_calls"]["tried"] == 4
    assert 1 >= eight["agreement"]["value"] > four["agreement"]["value"] > 0.3
    nats = {name: row["divergence_nats"]["value"] for name, row in rows.items()}
    assert 0 < nats["8"] < nats["k8v4"] < nats["k6v4"] < nats["4"]
    for row in rows.values():
        assert row["texts"].keys() == {str(text), "English", "far copy"}
        assert row["texts"][row["worst_text"]] == max(row["texts"].values())
        assert row["divergence_p99_nats"] >= row["divergence_nats"]["value"]
    assert abs(eight["perplexity_rise"]["value"]) < 0.05
    assert own["kv_bytes_per_token"] == 2 * 2 * 64 * 4  # keys and values of two layers
    assert eight["kv_bytes_per_token"] / own["kv_bytes_per_token"] == pytest.approx(8.5 / 32)
    assert (eight["bits_per_number"], own["bits_per_number"]) == (8.5, 32)
    assert eight["layout"] == "8rb64,c256"


def test_table_names_the_text_and_the_worst_text(
    tiny_model_bos: Path,
    capsys: pytest.CaptureFixture[str],
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "KV_BITS", {name: KV_BITS[name] for name in ("k8v4", "8")})
    assert quality("--model", tiny_model_bos, "--text", text, "--context", "0") == 0
    out = capsys.readouterr().out
    assert f"on {text}: " in out and "worst text" in out
    assert re.search(r"\nk8v4 \(default\) +6\.50 .* 0\.\d{4}, (English|far copy) ", out)
    assert re.search(r"\n8 .* [+-]0\.\d\d% ± 0\.\d\d%", out)


def test_quality_reports_a_model_that_is_not_quantized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_model(tmp_path, head_dim=4, n_layers=1)
    assert quality("--model", model) == 0
    assert capsys.readouterr().out.startswith("Nothing of this model's cache is quantized")
    assert quality("--model", model, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rows"] == [] and report["why"].startswith("Nothing")
    assert report["left_out"].keys() == set(KV_BITS) - {"16"}


def test_quality_reports_an_unsupported_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlx_lm.models.deepseek_v41", reason="newer than this mlx-lm")
    model = make_zoo_model(tmp_path / "own", "deepseek_v41")
    assert quality("--model", model, "--context", "0") == 0
    output = capsys.readouterr().out
    assert "Nothing of this model's cache is quantized" in output and "LayerCache" in output


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"Too short.", "at least 64 are needed"),
        (b"\xff\xfe\xff", "is not UTF-8 text"),
    ],
)
def test_unusable_texts_are_refused_in_one_line(
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    problem: str,
) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    assert quality("--model", tiny_model, "--text", path) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"mlx-lm-kvpersist quality: {path} ") and problem in err


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (("--model", "/no/such/folder"), "the model folder /no/such/folder does not exist"),
        (("--model", "."), "--model . cannot be loaded (FileNotFoundError: "),
    ],
)
def test_unusable_models_are_refused_in_one_line(
    argv: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quality(*argv) == 1
    err = capsys.readouterr().err
    assert problem in err and err.count("\n") == 1


@pytest.mark.parametrize("prefix", [[], [99]])
@pytest.mark.parametrize("n_ids", [5, 16, 17, 60])
def test_windows_predict_each_token_once(prefix: list[int], n_ids: int) -> None:
    ids = list(range(n_ids))
    predicted: list[int] = []
    for window, n_context in checks.windows_of(ids, prefix, 16, 6):
        assert window[: len(prefix)] == prefix and len(window) <= 16
        assert n_context >= 1
        window_ids = window[len(prefix) :]
        assert window_ids == ids[window_ids[0] : window_ids[-1] + 1]
        if window_ids[0]:
            assert n_context - len(prefix) >= 16 - len(prefix) - 6
        predicted += window[n_context:]
    assert predicted == ids[0 if prefix else 1 :]


@pytest.mark.parametrize("text", [None, "灯台は毎晩島を照らす。\n" * 40])
def test_facts_are_spread_over_the_document(tiny_model: Path, text: str | None) -> None:
    tokenizer = load(str(tiny_model))[1]
    text = text or OWN_TEXT.read_text(encoding="utf-8")
    document = checks.document_with_facts(tokenizer, text, 1200)
    for question, (thing, number), share in zip(
        checks.QUESTIONS[:3], checks.THINGS.items(), (0.1, 0.5, 0.9), strict=True
    ):
        assert thing in question and document.count(number) == 1
        assert document.index(number) / len(document) == pytest.approx(share, abs=0.15)
    assert 1150 < len(tokenizer.encode(document)) < 1400
    # If the facts are removed, the document is the text.
    for thing, number in checks.THINGS.items():
        document = document.replace(f" The number of the keeper's {thing} is {number}. ", "")
    assert "".join(document.split())[:300] == "".join(text.split())[:300]


@pytest.mark.parametrize("bits", [None, DEFAULT_BITS])
def test_batched_replies_equal_replies_to_each_prompt_alone(bits: str | None) -> None:
    model = tiny_llama(seed=5)
    shared = [i * 7 % 61 + 2 for i in range(300)]
    prompts = [
        [*shared, *tail] for tail in ([3, 4], [9], [i * 5 % 53 + 3 for i in range(255)], [3, 4, 8])
    ]
    make_cache = checks.served(model, KV_BITS[bits]).make_cache if bits else None

    def new_caches() -> list[Any]:
        return make_cache() if make_cache else make_prompt_cache(model)

    with checks.server_attention():
        replies = checks.replies_to(model, prompts, new_caches, 12, ends=set())
        for prompt, reply in zip(prompts, replies, strict=True):
            ids, caches = list(prompt), new_caches()
            logits = model(mx.array([ids]), cache=caches)
            for token in reply:
                assert logits[0, -1, token].item() > logits[0, -1].max().item() - 1e-3
                logits = model(mx.array([[token]]), cache=caches)
        end = replies[0][5]
        stopped = checks.replies_to(model, prompts[:1], new_caches, 12, ends={end})
    assert stopped == [replies[0][: replies[0].index(end)]]
    assert checks.replies_to(model, [], new_caches, 12, set()) == []


def test_tool_prompts_have_the_results_of_earlier_calls(
    tiny_model: Path, tiny_model_bos: Path
) -> None:
    tokenizer = load(str(tiny_model))[1]
    chain = checks.tool_prompts(tokenizer, "Once.")
    assert [call["arguments"]["lock"] for _, call in chain] == list(checks.LOCKS)
    rendered = [tokenizer.decode(ids) for ids, _ in chain]
    for number, prompt in enumerate(rendered):
        assert "Once." in prompt and "get_water_level" in prompt
        for n_earlier in range(len(checks.LOCKS)):
            assert (f"{1.5 + n_earlier / 4}" in prompt) == (n_earlier < number)
    plain: Any = SimpleNamespace(has_chat_template=False)
    assert checks.tool_prompts(plain, "Once.") == []


def test_tool_calls_are_parsed_from_replies() -> None:
    plain: Any = SimpleNamespace(has_tool_calling=False)
    call = {"name": "get_water_level", "arguments": {"lock": "Harrow {Weir}", "unit": "metres"}}
    assert checks.tool_call_in(plain, f"Sure. {{x}} {json.dumps(call)} Done.") == call
    assert checks.tool_call_in(plain, '{"name": "get_water') is None
    assert checks.tool_call_in(plain, "no call") is None

    def parse(inner: str, tools: object) -> dict[str, str]:
        if inner != "level(Harrow)":
            raise ValueError(inner)
        return {"name": "level"}

    own: Any = SimpleNamespace(
        has_tool_calling=True, tool_call_start="<call>", tool_call_end="</call>", tool_parser=parse
    )
    assert checks.tool_call_in(own, "x<call>level(Harrow)</call>y") == {"name": "level"}
    assert checks.tool_call_in(own, "x<call>level(Har</call>") is None
