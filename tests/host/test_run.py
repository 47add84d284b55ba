"""`run` around stock's `run`: the order of the hooks, and the end of the process."""

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
def exit_statuses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The statuses with which the process would have ended immediately."""
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
        hooks = [call[0] for call in echo.calls]
    return hooks


def test_normal_return_of_stock_calls_shutdown_without_exiting(
    patched_server: ModuleType, monkeypatch: pytest.MonkeyPatch, exit_statuses: list[int]
) -> None:
    hooks = serve(patched_server, monkeypatch, lambda *args: None)
    assert hooks == ["configure", "shutdown"]
    assert exit_statuses == []


def test_signal_while_listening_exits_with_status_0(
    patched_server: ModuleType, monkeypatch: pytest.MonkeyPatch, exit_statuses: list[int]
) -> None:
    def listen(*args: Any) -> None:
        with pytest.raises(KeyboardInterrupt):  # as stock does
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("threading.Timer.start", lambda timer: None)
    assert serve(patched_server, monkeypatch, listen)[-1] == "shutdown"
    assert exit_statuses == [0]


def test_interrupt_that_stock_does_not_catch_exits_with_status_130(
    patched_server: ModuleType, monkeypatch: pytest.MonkeyPatch, exit_statuses: list[int]
) -> None:
    def listen(*args: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("threading.Timer.start", lambda timer: None)
    with pytest.raises(SystemExit) as end:
        serve(patched_server, monkeypatch, listen)
    assert (exit_statuses, end.value.code) == ([130], 130)


def test_fatal_error_is_printed_and_exits_with_status_1(
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


def test_exception_of_stock_is_raised_after_the_shutdown_hook(
    patched_server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks: list[str] = []

    class Recording(Echo):
        def record(self, *call: Any) -> None:
            hooks.append(call[0])

    def listen(*args: Any) -> None:
        raise OSError("Address already in use")

    monkeypatch.setattr(patched_server, "ResponseGenerator", lambda *args: None)
    monkeypatch.setattr(patched_server, "_run_http_server", listen)
    with plugged(Recording()), pytest.raises(OSError, match="already in use"):
        patched_server.run("127.0.0.1", 0, SimpleNamespace(cli_args=PROVIDER_ARGS))
    assert hooks == ["configure", "shutdown"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((256, resource.RLIM_INFINITY), (4096, resource.RLIM_INFINITY)),  # macOS
        ((256, 1024), (1024, 1024)),
        ((8192, 10_240), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_soft_limit_of_open_files_is_raised_within_the_hard_limit(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], after: tuple[int, int] | None
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: before)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: limits.append(limit))
    run.allow_open_files()
    assert limits == ([] if after is None else [after])


def test_error_for_an_unknown_option_suggests_a_similar_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = run.PluginArgumentParser(prog="server")
    parser.add_argument("--kvpersist-disk")
    for typed, expected in (
        ("--kvpersist-dsk", "; did you mean --kvpersist-disk?\n"),
        ("--x", "--x\n"),
    ):
        with plugged(Echo()), pytest.raises(SystemExit) as end:
            parser.parse_args([typed])
        assert end.value.code == 2 and capsys.readouterr().err.endswith(expected)
