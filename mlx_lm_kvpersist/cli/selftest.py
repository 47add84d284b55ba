"""`mlx-lm-kvpersist selftest`: check what the server checks at its start, patches and plugins.

Each patch is applied alone to show that its probe tells a patched server from a stock one.
Then the server's own `main` is run with all patches, up to the point where it would listen.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any
from unittest import mock

from ..errors import KVPersistError, PatchNotEffective, SelfTestFailed
from ..host import install, uninstall
from ..host.patching import versions
from ..host.patching.patch import PATCH_SET, Patch, PatchSet, look_up
from ..host.patching.patches import PATCHES
from .output import console, print_json, print_table


@dataclass(frozen=True)
class Result:
    """One check: its name, whether it passed, and what was wrong."""

    name: str
    passed: bool
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class Report:
    """All checks of one run, and the versions they were run with."""

    mlx_lm: str
    mlx: str
    known: bool
    results: list[Result] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)


def run_selftest(
    plugins: Sequence[str] = ("kvpersist",), server_options: Sequence[str] = ()
) -> Report:
    """Check the versions, every patch, and the plugins' start from configure to shutdown.

    server_options: more of the server's command line, for example a plugin's folder.
    """
    checks: list[tuple[str, Callable[[], None]]] = [
        ("versions", versions.check),
        *((f"patch {patch.name}", partial(check_patch, patch)) for patch in PATCHES),
        ("startup", partial(check_startup, plugins, server_options)),
    ]
    return Report(
        mlx_lm=found_version("mlx-lm"),
        mlx=found_version("mlx"),
        known=versions.is_measured(),
        results=[timed(name, check) for name, check in checks],
    )


def timed(name: str, check: Callable[[], None]) -> Result:
    """Run a check; an exception becomes its result."""
    start = time.perf_counter()
    error = ""
    try:
        check()
    except Exception as caught:
        error = str(caught)
        if not isinstance(caught, KVPersistError):
            error = f"{type(caught).__name__}: {error}"
    return Result(name, not error, round(time.perf_counter() - start, 3), error)


def check_patch(patch: Patch) -> None:
    """Raise what is wrong with a patch; see `patch_checks`."""
    with contextlib.closing(patch_checks(patch)) as checks:
        for _, check in checks:
            check()


def patch_checks(patch: Patch) -> Generator[tuple[str, Callable[[], None]], None, None]:
    """Yield the names and checks of one patch. Each relies on those before it.

    The checks raise TargetMissing or SignatureChanged where the host differs, PatchNotEffective
    where the patch does nothing, and SelfTestFailed where its probe proves nothing or the patch
    does not come and go as a whole. The patch is undone when the generator is closed.
    """
    patches = PatchSet()

    def find() -> Any:
        return look_up(patch.module, patch.attribute)

    def apply() -> None:
        patches.apply([patch])
        patch.check()

    def apply_again() -> None:
        replaced = find()
        patches.apply([patch])
        if find() is not replaced:
            raise SelfTestFailed(
                f"patch {patch.name}, applied twice, replaces {patch.target} twice"
            )

    def undo() -> None:
        patches.undo()
        if find() is not stock:
            raise SelfTestFailed(f"patch {patch.name}, undone, leaves {patch.target} replaced")
        expect_failure(patch, "after undo")

    try:
        yield "target", find
        stock = find()
        yield "as expected", patch.check_host
        yield "fails without", partial(expect_failure, patch, "before the patch")
        yield "works", apply
        yield "twice is once", apply_again
        yield "fails after undo", undo
    finally:
        patches.undo()


def expect_failure(patch: Patch, when: str) -> None:
    """Raise SelfTestFailed if a probe passes where it must not."""
    try:
        patch.check()
    except PatchNotEffective:
        return
    raise SelfTestFailed(
        f"the probe of patch {patch.name} passes {when}, so it proves nothing; "
        f"expected {patch.target} to be the stock one (is the server patched already?)"
    )


def check_startup(plugins: Sequence[str], server_options: Sequence[str]) -> None:
    """Run the server's `main` with plugins and without a model, until it listens.

    Parses options, configures the plugins, probes the patches, runs the plugins' `self_test`,
    starts the generation thread, opens a port, and shuts all down. Raises what stopped it.
    The kvpersist plugin is given a temporary store unless `server_options` name one.
    """
    if PATCH_SET.is_applied:
        raise SelfTestFailed("the server is patched already; run the self-test in its own process")
    argv = [
        "mlx_lm.server",
        *(f"--plugin={name}" for name in plugins),
        *("--host=127.0.0.1", "--port=0", "--log-level=ERROR"),
    ]
    server = importlib.import_module("mlx_lm.server")
    install(plugins)
    stderr = io.StringIO()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="kvpersist-selftest-") as folder,
            mock.patch.object(sys, "argv", argv),
            mock.patch.object(server.ThreadingHTTPServer, "serve_forever", end_instead),
            quiet_host(),
            contextlib.redirect_stderr(stderr),
        ):
            if "kvpersist" in plugins:
                argv.append(f"--kvpersist-dir={folder}/store")
            argv.extend(server_options)
            server.main()
    except Listening:
        return
    except SystemExit as end:
        # argparse prints and exits; our own exits carry their cause.
        raise end.__cause__ or SelfTestFailed(stderr.getvalue().strip() or str(end)) from None
    finally:
        uninstall()
    raise SelfTestFailed("the server ended before it listened; expected it to start")


class Listening(BaseException):
    """The server has started and would now wait for requests."""


def end_instead(server: Any, poll_interval: float = 0.5) -> None:
    """Replace `serve_forever`: close the server and raise Listening."""
    server.server_close()
    raise Listening


@contextlib.contextmanager
def quiet_host() -> Iterator[None]:
    """Ignore stock's warning about production use, and undo what `main` does to logging."""
    handlers, level = logging.root.handlers[:], logging.root.level
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


def found_version(distribution: str) -> str:
    """Return an installed version, or "none"."""
    try:
        return versions.installed(distribution)
    except KVPersistError:
        return "none"


def run(args: argparse.Namespace) -> int:
    """Run the self-test, print its report, and return the exit status."""
    plugins = [] if args.no_plugin else args.plugin or ["kvpersist"]
    report = run_selftest(plugins, args.server_options)
    if args.json:
        print_json({**asdict(report), "passed": report.passed})
    else:
        print_report(report)
    return 0 if report.passed else 1


def print_report(report: Report) -> None:
    """Print a report as a table."""
    known = "" if report.known else " (not measured)"
    console().print(f"mlx-lm {report.mlx_lm}, mlx {report.mlx}{known}")
    console().print("measured: " + "; ".join(map(str, versions.PAIRS)))
    rows = [
        [each.name, "ok" if each.passed else "failed", f"{each.seconds:.2f}", each.error]
        for each in report.results
    ]
    print_table(["check", "result", "s", "what is wrong"], rows, right="s")
