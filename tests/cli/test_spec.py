from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvpersist.cli import main as cli
from tests.support import make_zoo_model


def spec_report(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    cli.main(["spec", *argv, "--json"])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_spec_of_a_model_with_full_attention(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["spec", "--model", str(tiny_model)]) == 0
    output = capsys.readouterr().out
    assert re.search("KVCache +full +1 x 64 float32 +1 x 64 float32 ", output)
    # Bytes in each layer: 64 for a key's codes, 32 for a value's, 4 each for scale and bias.
    assert "A token takes 208 B live and on disk, 0.20 of 1.0 KiB" in output
    assert "The newest tokens, 255 at most, are kept as computed: up to 255.0 KiB." in output
    assert "Reusable: a conversation to its end, or up to any multiple of 256 tokens." in output


def test_spec_takes_the_servers_precision_option(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layouts = [
        spec_report(capsys, "--model", str(tiny_model), "--kvpersist-kv-bits", bits)["layout"]
        for bits in ("4", "8", "k6v4", "16")
    ]
    assert layouts == ["4rb64,c256", "8rb64,c256", "k6rv4rb64,c256", "full"]


def test_default_precision_is_8_bit_keys_and_4_bit_values(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["spec", "--model", str(tiny_model)]) == 0
    output = capsys.readouterr().out
    assert "Bits of the keys by layer: 88\n" in output
    assert "Bits of the values by layer: 44\n" in output
    assert "Precision: keys 8 bits, values 4, rotated.\n" in output
    assert spec_report(capsys, "--model", str(tiny_model))["layout"] == "k8rv4rb64,c256"


def test_spec_of_models_with_windows_and_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sliding = str(make_zoo_model(tmp_path / "sliding", "gemma3_text"))
    recurrent = str(make_zoo_model(tmp_path / "recurrent", "nemotron_h"))
    for model in (sliding, recurrent):
        assert cli.main(["spec", "--model", model]) == 0
    output = capsys.readouterr().out
    assert "RotatingKVCache  sliding" in output and "up to the checkpoints" in output
    assert "ArraysCache  recurrent" in output
    assert (
        output.count("Batching: prompts of several clients are computed, and replies decoded") == 1
    )
    assert output.count("Batching: the replies of several clients are decoded together") == 1
    kinds = [group["kind"] for group in spec_report(capsys, "--model", recurrent)["groups"]]
    assert "recurrent" in kinds and "full" in kinds


def test_spec_of_an_unsupported_model_fails_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlx_lm.models.deepseek_v41", reason="newer than this mlx-lm")
    model = str(make_zoo_model(tmp_path / "own", "deepseek_v41"))
    assert cli.main(["spec", "--model", model]) == 1
    assert "nothing is kept: layer 0 has a LayerCache" in capsys.readouterr().out
    assert spec_report(capsys, "--model", model)["kept"] is False


@pytest.mark.parametrize("name", ["/no/such", "./no", "models/a/b", "a name", "-b"])
def test_a_missing_model_folder_is_reported_in_one_line(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["spec", f"--model={name}"]) == 1
    err = capsys.readouterr().err
    assert f"the model folder {name} does not exist; expected a folder" in err
    assert err.count("\n") == 1
