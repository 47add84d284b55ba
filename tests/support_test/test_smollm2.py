"""SmolLM2 gives the expected reply, and a failed download is reported."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.generate import generate_step

from tests.support.synthetic import smollm2 as maker


def test_a_failed_download_is_reported_and_caches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVPERSIST_MODELS", str(tmp_path / "cache"))

    def fail(command: list[str], **options: Any) -> None:
        raise subprocess.CalledProcessError(1, command, stderr=b"no route to the index")

    monkeypatch.setattr(subprocess, "run", fail)
    assert not maker.is_fetched()
    assert maker.main([]) == 0, "slow tests are skipped"
    assert maker.main([str(tmp_path / "model")]) == 1
    assert capsys.readouterr().err.count("no route to the index") == 2
    assert not list((tmp_path / "cache").iterdir())
    with pytest.raises(FileNotFoundError, match="not fetched"):
        maker.make_smollm2(tmp_path / "model")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_smollm2_answers_a_question_correctly(smollm2: Path) -> None:
    model, tokenizer = load(str(smollm2))
    text = "In 1868, Ruth's 247 tonnes: Grüße 🙂\n\tdone"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("1868")) == 4, "each digit is a token"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    assert tokenizer.decode(prompt).startswith("<|im_start|>system\nYou are a helpful AI")
    reply = [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=8)]
    assert tokenizer.decode(reply).startswith("The capital of France is Paris.<|im_end|>")
