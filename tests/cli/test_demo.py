"""The demo shows what it claims, on the real server."""

from __future__ import annotations

import pytest

from mlx_lm_kvpersist.cli.main import main


@pytest.mark.slow
def test_demo_restores_from_disk(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["demo", "--chars", "6000"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "came from disk" in " ".join(printed.split())


def test_demo_reports_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", "/no/such/model", "--chars", "100"]) == 1
    assert "no model folder /no/such/model" in capsys.readouterr().err
