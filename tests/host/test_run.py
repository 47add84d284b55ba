"""`run` around stock's: the order of the hooks, and how the process ends."""

from __future__ import annotations

import resource
import signal
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.errors import ModelNotSupported
from mlx_lm_kvpersist.host import run
from mlx_lm_kvpersist.host.patching.probes import ARGS
from tests.support.host import plugged

from .plugins import Echo

PROVIDER_ARGS = SimpleNamespace(**vars(ARGS), plugin=["echo"], echo_file=None)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The status with which the process would have ended immediately."""
    statuses: list[int] = []
    monkeypatch.setattr(run, "end_process", statuses.append)
    return statuses


def serve(
    server: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    stock: Any,
    provider: Any = None,
) -> list[str]:
    """Call `run` as `main` does, with `stock` instead of listening; return the called hooks."""
    monkeypatch.setattr(server, "ResponseGenerator", lambda *args: None)
    monkeypatch.setattr(server, "_run_http_server", stock)
    provider = provider or SimpleNamespace(cli_args=PROVIDER_ARGS)
    echo = Echo()
    try:
        with plugged(echo):
            server.run("127.0.0.1", 0, model_provider=provider)
    finally:
        asked = [call[0] for call in echo.calls]
    return asked


def test_stocks_own_end_is_an_ordinary_end(
    patched_server: ModuleType, monkeypatch: pytest.MonkeyPatch, ended: list[int]
) -> None:
    asked = serve(patched_server, monkeypatch, lambda *args: None)
    assert asked == ["configure", "shutdown"]
    assert ended == []


def test_a_signal_while_listening_ends_with_0(
    patched_server: ModuleType, monkeypatch: pytest.MonkeyPatch, ended: list[int]
) -> None:
    def listen(*args: Any) -> None:
        with pytest.raises(KeyboardInterrupt):  # as stock does
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("threading.Timer.start", lambda timer: None)
    assert serve(patched_server, monkeypatch, listen)[-1] == "shutdown"
    assert ended == [0]


def test_a_signal_before_listening_ends_with_130(
    patched_server: ModuleType, monkeypatch: pytest.MonkeyPatch, ended: list[int]
) -> None:
    def listen(*args: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("threading.Timer.start", lambda timer: None)
    with pytest.raises(SystemExit) as end:
        serve(patched_server, monkeypatch, listen)
    assert (ended, end.value.code) == ([130], 130)


def test_a_fatal_error_is_told_after_the_shutdown(
    patched_server: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = ModelNotSupported("its cache cannot be kept")
    provider = SimpleNamespace(cli_args=PROVIDER_ARGS, fatal_error=error)
    with pytest.raises(SystemExit) as end:
        serve(patched_server, monkeypatch, lambda *args: None, provider)
    assert end.value.code == 1
    assert capsys.readouterr().err.endswith(": its cache cannot be kept\n")


def test_what_stock_raises_is_raised_after_the_shutdown(
    patched_server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Notes(Echo):
        def record(self, *call: Any) -> None:
            asked.append(call[0])

    def listen(*args: Any) -> None:
        raise OSError("Address already in use")

    monkeypatch.setattr(patched_server, "ResponseGenerator", lambda *args: None)
    monkeypatch.setattr(patched_server, "_run_http_server", listen)
    with plugged(Notes()), pytest.raises(OSError, match="already in use"):
        patched_server.run("127.0.0.1", 0, SimpleNamespace(cli_args=PROVIDER_ARGS))
    assert asked == ["configure", "shutdown"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((256, resource.RLIM_INFINITY), (4096, resource.RLIM_INFINITY)),  # macOS
        ((256, 1024), (1024, 1024)),
        ((8192, 10_240), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_a_server_may_open_more_files_than_a_mac_allows_at_first(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], after: tuple[int, int] | None
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: before)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: limits.append(limit))
    run.allow_open_files()
    assert limits == ([] if after is None else [after])


def test_an_unknown_option_is_told_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    parser = run.PluginArgumentParser(prog="server")
    parser.add_argument("--kvpersist-disk")
    for typed, said in (
        ("--kvpersist-dsk", "; did you mean --kvpersist-disk?\n"),
        ("--x", "--x\n"),
    ):
        with plugged(Echo()), pytest.raises(SystemExit) as end:
            parser.parse_args([typed])
        assert end.value.code == 2 and capsys.readouterr().err.endswith(said)
