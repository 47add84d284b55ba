from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvpersist.cli import main as cli
from tests.support import make_zoo_model


def described(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    cli.main(["spec", *argv, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_plain_model(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["spec", "--model", str(tiny_model)]) == 0
    said = capsys.readouterr().out
    assert re.search("KVCache +full +1 x 64 float32 +1 x 64 float32 ", said)
    # Bytes in each layer: 64 for a key's codes, 32 for a value's, 4 each for scale and bias.
    assert "A token takes 208 B live and on disk, 0.20 of 1.0 KiB" in said
    assert "The newest tokens, 255 at most, are kept as computed: up to 255.0 KiB." in said
    assert "Reusable: a conversation to its end, or up to any multiple of 256 tokens." in said


def test_precision_as_the_server_takes_it(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layouts = [
        described(capsys, "--model", str(tiny_model), "--kvpersist-kv-bits", bits)["layout"]
        for bits in ("4", "8", "k6v4", "16")
    ]
    assert layouts == ["4rb64,c256", "8rb64,c256", "k6rv4rb64,c256", "full"]


def test_the_default(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["spec", "--model", str(tiny_model)]) == 0
    said = capsys.readouterr().out
    assert "Bits of the keys by layer: 88\n" in said
    assert "Bits of the values by layer: 44\n" in said
    assert "Precision: keys 8 bits, values 4, rotated.\n" in said
    assert described(capsys, "--model", str(tiny_model))["layout"] == "k8rv4rb64,c256"


def test_windows_and_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sliding = str(make_zoo_model(tmp_path / "sliding", "gemma3_text"))
    recurrent = str(make_zoo_model(tmp_path / "recurrent", "nemotron_h"))
    for model in (sliding, recurrent):
        assert cli.main(["spec", "--model", model]) == 0
    said = capsys.readouterr().out
    assert "RotatingKVCache  sliding" in said and "up to the checkpoints" in said
    assert "ArraysCache  recurrent" in said
    assert said.count("Batching: prompts of several clients are computed, and replies decoded") == 1
    assert said.count("Batching: the replies of several clients are decoded together") == 1
    kinds = [group["kind"] for group in described(capsys, "--model", recurrent)["groups"]]
    assert "recurrent" in kinds and "full" in kinds


def test_a_model_that_is_not_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mlx_lm.models.deepseek_v41", reason="newer than this mlx-lm")
    model = str(make_zoo_model(tmp_path / "own", "deepseek_v41"))
    assert cli.main(["spec", "--model", model]) == 1
    assert "nothing is kept: layer 0 has a LayerCache" in capsys.readouterr().out
    assert described(capsys, "--model", model)["kept"] is False


@pytest.mark.parametrize("name", ["/no/such", "./no", "models/a/b", "a name", "-b"])
def test_a_folder_that_does_not_exist_is_named(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["spec", f"--model={name}"]) == 1
    err = capsys.readouterr().err
    assert f"the model folder {name} does not exist; expected a folder" in err
    assert err.count("\n") == 1
