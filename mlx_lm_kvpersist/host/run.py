"""How the server starts and ends: its options, the plugins' startup and shutdown, and signals."""

from __future__ import annotations

import argparse
import atexit
import inspect
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from types import FrameType, ModuleType
from typing import Any, NoReturn

from ..errors import ConfigError
from ..ranks import alone, ranks
from . import manager
from .hooks import hookimpl
from .stopping import report, stop, with_nearest

GRACE_S = 30.0
"""How long a signalled server may take to end."""
OPEN_FILES = 4096
"""Files and connections that a server may need at the same time."""

_ESCAPES = {i: f"\\x{i:02x}" for i in (*range(0x20), *range(0x7F, 0xA0)) if chr(i) not in "\n\t"}


class PrintableFormatter(logging.Formatter):
    """Formats like `stock`, and escapes control characters except line ends and tabs.

    Log lines quote clients, and a terminal that shows the log would obey control characters.
    """

    def __init__(self, stock: logging.Formatter) -> None:
        super().__init__()
        self._stock = stock

    def format(self, record: logging.LogRecord) -> str:
        return self._stock.format(record).translate(_ESCAPES)


class PluginArgumentParser(argparse.ArgumentParser):
    """A parser that accepts `--plugin` and the options of the plugins.

    The plugins' options are added after all stock options, when the command line is parsed. So a
    plugin that repeats a stock option gets the error.
    """

    _plugin_option: argparse.Action | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._plugin_option is None:
            # The option's value was read earlier; here it is checked and documented.
            self._plugin_option = self.add_argument_group("plugins").add_argument(
                "--plugin", action="append", default=[], metavar="NAME"
            )
            try:
                manager.ask("add_options", parser=self)
            except Exception as error:
                stop(error)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        super().error(with_nearest(message, self._option_string_actions))

    def format_help(self) -> str:
        if self._plugin_option is not None:
            self._plugin_option.help = (
                "Load a plugin of the server; can be given more than once. "
                f"Installed: {', '.join(manager.installed_plugins()) or 'none'}"
            )
        return super().format_help()


def plugin_argparse(stock: ModuleType) -> ModuleType:
    """Return a copy of argparse with our ArgumentParser, for `mlx_lm.server` only."""
    view = ModuleType(stock.__name__, stock.__doc__)
    vars(view).update({**vars(stock), "ArgumentParser": PluginArgumentParser})
    return view


class PatchChecks:
    """An internal plugin: runs the checks of the patches after the plugins are configured."""

    def __init__(self, checks: Sequence[Callable[[], None]]) -> None:
        self._checks = checks

    @hookimpl(trylast=True)
    def configure(self) -> None:
        with alone():  # a check's requests are not for other ranks
            for check in self._checks:
                check()


def plugin_run(stock: Callable[..., None]) -> Callable[..., None]:
    """Return a `run` that starts the plugins before mlx-lm's `run`, and ends them after it.

    Main thread. If a plugin raises before the server listens, or while the default model is
    prepared, the process ends: the user has asked for this plugin.
    """
    signature = inspect.signature(stock)

    @wraps(stock)
    def run(*args: Any, **kwargs: Any) -> None:
        allow_open_files()
        call = signature.bind(*args, **kwargs).arguments
        provider = call["model_provider"]
        status = 0
        for log in logging.getLogger().handlers:
            log.setFormatter(PrintableFormatter(log.formatter or logging.Formatter()))
        with ending_cleanly(provider) as signals:
            try:
                if ranks().decides:  # other ranks do not listen
                    check_address(call["host"], call["port"])
                try:
                    manager.ask("configure", args=provider.cli_args)
                    ranks().watch()
                except Exception as reason:
                    stop(reason)
                stock(*args, **kwargs)
            except KeyboardInterrupt:
                # Stock catches interrupts once it listens. An earlier interrupt needs no message.
                status = 130
            finally:
                manager.ask("shutdown")
        if (error := getattr(provider, "fatal_error", None)) is not None:
            report(error)
            status = 1
        if signals:
            end_process(status)
        if status:
            raise SystemExit(status)

    return run


def allow_open_files() -> None:
    """Raise the soft limit of open files to OPEN_FILES, as far as the hard limit allows.

    macOS starts processes with 256. Each client needs one file, and threads that read stored files
    need more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_address(host: str, port: int) -> None:
    """End the process with one line if the server could not listen at this address.

    The stock server begins to load a model before it listens. If it then cannot listen, it still
    loads the whole model.
    """
    try:
        if not 0 <= port < 1 << 16:  # getaddrinfo would take the port modulo 65536
            raise OverflowError("ports end at 65535")
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(info[0]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(info[4])
            probe.listen()
    except (OSError, OverflowError) as error:
        what = f"cannot listen at {host} port {port}: {getattr(error, 'strerror', None) or error}"
        stop(ConfigError(f"{what}; choose another --port, or a --host of this machine"))


_deferred: list[list[int]] = []
"""For each running block of `uninterrupted`, the signals that have arrived in it."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let a signal that ends the server wait until the end of the block. Main thread."""
    deferred: list[int] = []
    _deferred.append(deferred)
    try:
        yield
    finally:
        _deferred.pop()
        if deferred:
            raise KeyboardInterrupt(deferred[0])


@contextmanager
def ending_cleanly(provider: Any = None, grace_s: float = GRACE_S) -> Iterator[list[int]]:
    """Make SIGTERM and SIGHUP end the server as Ctrl-C does; yield the received signals.

    The handler raises KeyboardInterrupt. mlx-lm's `run` catches it, stops listening and joins the
    generation thread. If threads prevent the end, the process is stopped after `grace_s` seconds,
    or immediately by a second signal. SIGHUP is not counted as a first or second signal: if a
    terminal is closed, the kernel and the shell send one each. A second signal is also ignored if
    the generation thread has failed (`provider.fatal_error`), because the failure itself sends a
    signal. Outside the main thread nothing changes.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def handler(number: int, frame: FrameType | None) -> None:
        if received == [signal.SIGHUP]:
            received[:] = [number]  # when a session ends, SIGTERM often comes next
            return
        if number == signal.SIGHUP and received:
            return
        received.append(number)
        if len(received) == 2 and getattr(provider, "fatal_error", None) is not None:
            return
        if len(received) > 1:
            end_now(number, "asked twice")
        clock = threading.Timer(grace_s, end_now, (number, f"not ended after {grace_s:g} s"))
        clock.daemon = True
        clock.start()
        if not _deferred:
            raise KeyboardInterrupt(number)
        _deferred[-1].append(number)

    previous: dict[signal.Signals, Any] = {signal.SIGTERM: signal.signal(signal.SIGTERM, handler)}
    # A shell starts background jobs with SIGINT ignored, nohup ignores SIGHUP: both stay ignored.
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
            previous[number] = signal.signal(number, handler)
    try:
        yield received
    finally:
        for number, former in previous.items():
            signal.signal(number, former)


def end_now(number: int, reason: str) -> NoReturn:
    with suppress(OSError):  # the terminal may be closed
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{reason}, stopped\n".encode())
    os._exit(128 + number)


def end_process(status: int) -> NoReturn:
    """End the process as the end of `main` would, but without running C++ destructors.

    After a thread has computed with MLX, a C++ thread remains. Its destructor aborts the process
    (mlx 0.31.2 to 0.32.4).
    """
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: was closed at the start
        with suppress(OSError):  # the terminal may be closed
            stream.flush()
    os._exit(status)
