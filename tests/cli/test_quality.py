"""`quality` measures what it says, on a tiny model, and recommends what the rows bear."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlx_lm import load

from mlx_lm_kvpersist.cache.geometry.precision import Estimate
from mlx_lm_kvpersist.cli import main as cli
from mlx_lm_kvpersist.cli import quality_checks as checks
from mlx_lm_kvpersist.cli.quality import encode
from mlx_lm_kvpersist.cli.quality_advice import (
    Needles,
    Row,
    ToolCall,
    caveats,
    recommend,
)
from mlx_lm_kvpersist.cli.story import OWN_TEXT
from mlx_lm_kvpersist.config import KV_BITS
from tests.support import make_tiny_model, make_zoo_model

SHORT = ("--window", "128", "--stride", "64", "--context", "160")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The beginning of the package's own text."""
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text(OWN_TEXT.read_text(encoding="utf-8")[:1500], encoding="utf-8")
    return path


def quality(*argv: str | Path) -> int:
    return cli.main(["quality", *map(str, argv)])


def test_fewer_bits_are_further_away(
    tiny_model: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--model", tiny_model, "--text", text, *SHORT, "--kvpersist-kv-rotate", "off", "--json")
    assert quality(*argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["text"]["name"] == str(text) and report["reference"] == "float32"
    assert report["text"]["predicted"] == report["text"]["tokens"] - 1
    rows = {row["precision"]: row for row in report["rows"]}
    assert rows.keys() | report["left_out"].keys() == KV_BITS.keys()
    own, eight, four = rows["16"], rows["8"], rows["4"]
    nothing = {"value": 0.0, "error": 0.0}
    assert (own["divergence_nats"], own["perplexity_rise"]) == (nothing, nothing)
    assert own["agreement"] == {"value": 1.0, "error": 0.0}
    assert own["needles"]["same"] == own["needles"]["tried"] == 3
    assert own["tool_call"]["same"]
    assert 1 > eight["agreement"]["value"] > four["agreement"]["value"] > 0.3
    nats = {name: row["divergence_nats"]["value"] for name, row in rows.items()}
    assert 0 < 10 * nats["8"] < nats["6"] * 2 < nats["5"] < nats["4"]
    for mixed in {"k6v4", "k8v4"} & rows.keys():
        assert nats["8"] < nats[mixed] < nats["4"]
    assert abs(eight["perplexity_rise"]["value"]) < 0.05
    assert own["kv_bytes_per_token"] == 2 * 2 * 2 * 64 * 4
    assert eight["kv_bytes_per_token"] / own["kv_bytes_per_token"] == pytest.approx(9 / 32)
    assert (eight["bits_per_number"], own["bits_per_number"]) == (9, 32)
    assert eight["layout"] == "8b64"
    assert report["recommended"] in rows


def test_the_table_names_text_and_advice(
    tiny_model_bos: Path, capsys: pytest.CaptureFixture[str], text: Path
) -> None:
    assert (
        quality(
            "--model",
            tiny_model_bos,
            "--text",
            text,
            *SHORT,
            "--no-needle",
            "--kvpersist-kv-rotate",
            "off",
        )
        == 0
    )
    out = capsys.readouterr().out
    assert f"on {text}: " in out
    assert "Recommended: " in out and "same next token" in out
    assert "makes no tool call that can be read" in out
    assert re.search(r"default: bits of the keys by layer: 88\n", out)
    assert re.search(r"\n8 .* [+-]0\.\d\d% ± 0\.\d\d%", out)


def test_a_model_of_which_nothing_is_quantized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_model(tmp_path, head_dim=4, n_layers=1)
    assert quality("--model", model) == 0
    assert capsys.readouterr().out.startswith("Nothing of this model's cache is quantized")
    assert quality("--model", model, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["rows"], report["recommended"]) == ([], "16")
    assert report["left_out"].keys() == KV_BITS.keys() - {"16"}


def test_a_model_that_is_not_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mlx_lm.models.deepseek_v41", reason="newer than this mlx-lm")
    model = make_zoo_model(tmp_path / "own", "deepseek_v41")
    assert quality("--model", model, "--no-needle") == 0
    said = capsys.readouterr().out
    assert "Nothing of this model's cache is quantized" in said and "LayerCache" in said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"Too short.", "at least 64 are needed"),
        (b"\xff\xfe\xff", "is not UTF-8 text"),
    ],
)
def test_bad_texts(
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    said: str,
) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    assert quality("--model", tiny_model, "--text", path) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"mlx-lm-kvpersist quality: {path} ") and said in err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--model", "/no/such/folder"), "there is no model folder /no/such/folder"),
        (("--model", "."), "the model . cannot be loaded: "),
        (("--model", "x", "--window", "64", "--stride", "64"), "must be less than --window 64"),
    ],
)
def test_bad_options(argv: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert quality(*argv) == 1
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.parametrize("begin", [[], [99]])
@pytest.mark.parametrize("n_ids", [5, 16, 17, 60])
def test_windows_predict_each_token_once(begin: list[int], n_ids: int) -> None:
    ids = list(range(n_ids))
    predicted: list[int] = []
    for window in checks.windows_of(ids, begin, 16, 6):
        assert list(window.ids[: len(begin)]) == begin and len(window.ids) <= 16
        assert window.n_context >= 1
        part = window.ids[len(begin) :]
        assert list(part) == ids[part[0] : part[-1] + 1]
        if part[0]:
            assert window.n_context - len(begin) >= 16 - len(begin) - 6
        predicted += window.ids[window.n_context :]
    assert predicted == ids[0 if begin else 1 :]


def test_a_begin_token_is_used_where_the_tokenizer_has_one(
    tiny_model: Path, tiny_model_bos: Path
) -> None:
    for path, expected in ((tiny_model, False), (tiny_model_bos, True)):
        tokenizer = load(str(path))[1]
        begin, ids = encode(tokenizer, "The lock")
        assert bool(begin) == expected
        assert tokenizer.decode(ids) == "The lock"


def test_needles_lie_where_they_should(tiny_model: Path) -> None:
    tokenizer = load(str(tiny_model))[1]
    text = OWN_TEXT.read_text(encoding="utf-8")
    for depth, ids in checks.needle_prompts(tokenizer, text, 1200, (0.1, 0.9)):
        prompt = tokenizer.decode(ids)
        assert prompt.count(checks.SECRET) == 1
        assert prompt.index(checks.SECRET) / len(prompt) == pytest.approx(depth, abs=0.1)
        assert 1150 < len(ids) < 1250
        assert prompt.index(checks.NEEDLE_QUESTION) > prompt.index(checks.SECRET)


def test_needles_in_text_without_blanks(tiny_model: Path) -> None:
    tokenizer = load(str(tiny_model))[1]
    text = "灯台は毎晩島を照らす。\n" * 40
    for depth, ids in checks.needle_prompts(tokenizer, text, 1200, (0.1, 0.9)):
        prompt = tokenizer.decode(ids)
        assert prompt.index(checks.SECRET) / len(prompt) == pytest.approx(depth, abs=0.15)
        assert 1100 < len(ids) < 1300


def test_tool_calls_are_read() -> None:
    plain: Any = SimpleNamespace()
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


def row(precision: str, kv_bytes: float, **fields: Any) -> Row:
    same: dict[str, Any] = {
        "perplexity": 10.0,
        "perplexity_rise": 0.0,
        "agreement": 0.99,
        "divergence_nats": 0.001,
        "needles": Needles(3, 3, 3),
        "tool_call": ToolCall(parses=True, same=True),
    }
    sure: dict[str, Any] = {
        name: Estimate(value, 1e-5) if isinstance(value, float) else value
        for name, value in {**same, **fields}.items()
    }
    return Row(precision, precision, kv_bytes / 4, kv_bytes, **sure)


OWN = row("16", 100, agreement=1.0)


@pytest.mark.parametrize(
    ("rows", "expected", "why"),
    [
        ([row("8", 53), row("4", 28)], "4", "It takes 28% of the memory"),
        ([row("8", 53), row("4", 28, divergence_nats=0.02)], "8", "bits 8. It takes 53%"),
        ([row("8", 53), row("auto", 35), row("4", 28, perplexity_rise=0.02)], "auto", "35%"),
        ([row("8", 53), row("4", 28, needles=Needles(3, 2, 2))], "8", "loses nothing"),
        ([row("8", 53), row("4", 28, tool_call=ToolCall(False, False))], "8", "bits 8"),
        (
            [
                row("8", 53, perplexity_rise=0.5, divergence_nats=0.2),
                row("4", 28, divergence_nats=0.4),
            ],
            "16",
            "Even 8 raises the perplexity by 50.0% and diverges by 0.2 nats",
        ),
    ],
)
def test_the_smallest_that_loses_nothing_is_recommended(
    rows: list[Row], expected: str, why: str
) -> None:
    precision, said = recommend([OWN, *rows], 0.01)
    assert precision == expected
    assert why in said


def test_the_target_moves_the_limit() -> None:
    rows = [OWN, row("8", 53), row("4", 28, divergence_nats=0.1)]
    assert [recommend(rows, nats)[0] for nats in (0.01, 0.1)] == ["8", "4"]


def test_what_cannot_be_decided_is_said() -> None:
    assert caveats([OWN], 0.01) == []
    poor = row("16", 100, needles=Needles(3, 0, 3), tool_call=ToolCall(False, True))
    assert [line.split("precision ")[1] for line in caveats([poor], 0.01)] == [
        "finds none of the hidden facts: none can be lost.",
        "makes no tool call that can be read.",
    ]
    # And then it speaks against nobody.
    assert recommend([poor, row("4", 28, needles=Needles(3, 0, 0))], 0.01)[0] == "4"


def test_a_limit_within_the_error_is_said() -> None:
    near = row(
        "4", 28, perplexity_rise=Estimate(0.014, 0.002), divergence_nats=Estimate(0.013, 0.003)
    )
    far = row("8", 53, perplexity_rise=Estimate(0.012, 0.002))
    said = caveats([OWN, near, far], 0.01)
    assert [line.split(",")[0] for line in said] == [
        "4 raises the perplexity by 1.4%",
        "4 diverges by 0.013 nats",
    ]


def test_errors_are_those_of_a_mean() -> None:
    rng = random.Random(3)
    nll = [rng.gauss(2, 0.5) for _ in range(400)]
    above = [rng.gauss(0.01, 0.1) for _ in range(400)]
    each = (nll, above, above)
    sums = tuple(total for x in each for total in (sum(x), sum(one * one for one in x)))
    score = checks.TextScore(400, 300, sums)
    mean, error = statistics.fmean(above), statistics.pstdev(above) / 20
    assert score.divergence_nats.value == pytest.approx(mean)
    assert score.divergence_nats.error == pytest.approx(error)
    assert score.perplexity_rise.value == pytest.approx(math.exp(mean) - 1)
    assert score.perplexity_rise.error == pytest.approx(math.exp(mean) * error)
    assert score.perplexity.value == pytest.approx(math.exp(statistics.fmean(nll)))
    assert score.agreement.value == 0.75
    assert score.agreement.error == pytest.approx(math.sqrt(0.75 * 0.25 / 400))
