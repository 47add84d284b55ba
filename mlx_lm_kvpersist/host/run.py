"""The server's `run`: configures and tests the plugins first, shuts them down last."""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable
from functools import wraps
from typing import Any

from .._startup import report, stop
from ..errors import ConfigError
from . import manager
from .signals import end_process, ending_cleanly


def plugin_run(stock: Callable[..., None]) -> Callable[..., None]:
    """Return `run` between the plugins' startup and shutdown. Main thread.

    Whatever the plugins raise before the server listens, or while its default model is prepared,
    ends the process: it was asked for by name, so it never serves without the plugin.
    """
    signature = inspect.signature(stock)

    @wraps(stock)
    def run(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs).arguments
        provider = call["model_provider"]
        status = 0
        with ending_cleanly() as signals:
            try:
                check_address(call["host"], call["port"])
                try:
                    manager.ask("configure", args=provider.cli_args)
                    manager.ask("self_test")
                except Exception as reason:
                    stop(reason)
                stock(*args, **kwargs)
            except KeyboardInterrupt:
                # Stock catches it while it listens. Before that there is nothing to tell.
                status = 130
            finally:
                manager.ask_all("shutdown")
        if (error := getattr(provider, "fatal_error", None)) is not None:
            report(error)
            status = 1
        if signals:
            end_process(status)
        if status:
            raise SystemExit(status)

    return run


def check_address(host: str, port: int) -> None:
    """End the process with one line if the server could not listen there.

    Stock finds out after it has begun to load a model, and would go on loading it.
    """
    try:
        if not 0 <= port < 1 << 16:  # getaddrinfo takes it modulo 65536
            raise OverflowError("ports end at 65535")
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(info[0]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(info[4])
            probe.listen()
    except (OSError, OverflowError) as error:
        what = f"cannot listen at {host} port {port}: {getattr(error, 'strerror', None) or error}"
        stop(ConfigError(f"{what}; choose another --port, or a --host of this machine"))
