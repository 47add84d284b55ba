"""The `demo` command: its result on a real server, its progress lines, and its model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.generate import generate_step

from mlx_lm_kvpersist.cli import output
from mlx_lm_kvpersist.cli.demo import make_model
from mlx_lm_kvpersist.cli.main import main
from mlx_lm_kvpersist.cli.servers import document


@pytest.mark.slow
def test_demo_restores_from_disk(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["demo", "--chars", "6000"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    assert "came from disk" in captured.out and captured.out.count("\n") == 1


def test_an_ended_demo_leaves_no_server_and_no_files(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_lm_kvpersist", "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    assert process.stderr is not None
    assert any(line.startswith("2 of 5") for line in process.stderr)  # the server runs
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert not list(tmp_path.glob("kvpersist-demo-*"))


def test_demo_reports_a_missing_model_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", "/no/such/model", "--chars", "100"]) == 1
    assert "the model folder /no/such/model does not exist" in capsys.readouterr().err


def test_without_a_terminal_each_step_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with output.ongoing("a step") as show_step:
        assert capsys.readouterr().err == "a step …\n"
        show_step("the next")
        assert capsys.readouterr().err == "the next …\n"
    assert capsys.readouterr().err == ""


def test_in_a_terminal_steps_overwrite_one_line() -> None:
    code = (
        "from mlx_lm_kvpersist.cli.output import ongoing\n"
        "with ongoing('a step') as say:\n    say('the next')\n"
    )
    control, terminal = os.openpty()
    with open(control, "rb", buffering=0) as terminal_output:
        subprocess.run([sys.executable, "-c", code], stderr=terminal, check=True, timeout=60)
        os.close(terminal)
        shown = terminal_output.read(4096).decode()
    assert "the next" in shown and "\n" not in shown.rstrip().replace("\r\n", "", 1)


def test_demo_model_writes_printable_text_and_no_end_token(tmp_path: Path) -> None:
    model, tokenizer = load(str(make_model(tmp_path / "model")))
    messages = [{"role": "user", "content": document(300)}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert 70 < len(prompt) < 150, "about 3 characters a token"
    reply = [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=40)]
    assert not set(reply) & set(tokenizer.all_special_ids)
    assert tokenizer.decode(reply).isascii()
