"""The server's `run`: configures and tests the plugins first, shuts them down last."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from .._startup import report, stop
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
        provider = signature.bind(*args, **kwargs).arguments["model_provider"]
        status = 0
        with ending_cleanly() as signals:
            try:
                start_plugins(provider.cli_args)
                stock(*args, **kwargs)
            except KeyboardInterrupt:
                # Stock catches it while it listens. Before that there is nothing to tell.
                status = 130
            finally:
                manager.ask_safely("shutdown")
        if (error := getattr(provider, "startup_error", None)) is not None:
            report(error)
            status = 1
        if signals:
            end_process(status)
        if status:
            raise SystemExit(status)

    return run


def start_plugins(args: Any) -> None:
    """Configure and test the plugins, or end the process with one line."""
    try:
        manager.ask("configure", args=args)
        manager.ask("self_test")
    except Exception as error:
        stop(error)
