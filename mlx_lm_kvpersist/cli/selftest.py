"""`mlx-lm-kvpersist selftest`: check the patches, the plugins and the numbers."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

from ..config import add_options, precision_of
from ..errors import KVPersistError, PatchNotEffective, SelfTestFailed
from ..host import install, uninstall
from ..host.patching.patches import PATCHES, Patch, PatchSet, look_up
from ..host.stopping import requested_plugins
from ..round_trip import check_round_trip
from .doctor import PLUGIN, Finding, mlx_lm, report
from .output import Report
from .quality_checks import server_attention


def run(args: argparse.Namespace) -> Report:
    """Run the self-test, and say what it found."""
    plugins = requested_plugins(args.server_options) or [PLUGIN]
    command = " ".join(["mlx_lm.server", *(f"--plugin {name}" for name in plugins)])
    findings = run_selftest(args.server_options)
    return report(findings, command, f"{command} --model mlx-community/Qwen3-8B-4bit")


def run_selftest(server_options: Sequence[str] = ()) -> list[Finding]:
    """Check the versions, every patch, the plugins' start, and the numbers of kvpersist."""
    findings = [
        mlx_lm(),
        *(tried(f"patch {patch.name}", partial(check_patch, patch)) for patch in PATCHES),
        tried("startup", partial(check_startup, server_options)),
    ]
    if PLUGIN in (requested_plugins(server_options) or [PLUGIN]):
        findings.append(tried("round trip", partial(check_numbers, server_options)))
    return findings


def tried(name: str, check: Callable[[], str | None]) -> Finding:
    """Run a check. It returns what it found, None for "works"; an error becomes what was found."""
    try:
        result = check() or "works"
    except KVPersistError as error:
        return Finding(name, False, str(error))
    except Exception as error:
        return Finding(name, False, f"{type(error).__name__}: {error}")
    return Finding(name, True, result)


def check_patch(patch: Patch) -> None:
    """Apply a patch alone, and undo it.

    Raises TargetMissing or SignatureChanged if the host differs, PatchNotEffective if the patch
    does nothing, SelfTestFailed if its probe proves nothing, or undoing it leaves something.
    """
    patches, stock = PatchSet(), look_up(patch.module, patch.attribute)
    patch.check_host()
    _expect_failure(patch, "before the patch")
    try:
        patches.apply([patch])
        patch.check()
    finally:
        patches.undo()
    if look_up(patch.module, patch.attribute) is not stock:
        raise SelfTestFailed(f"patch {patch.name}, undone, leaves {patch.target} replaced")
    _expect_failure(patch, "after undo")


def _expect_failure(patch: Patch, when: str) -> None:
    try:
        patch.check()
    except PatchNotEffective:
        return
    raise SelfTestFailed(
        f"the probe of patch {patch.name} passes {when}, so it proves nothing; "
        f"expected {patch.target} to be the stock one (is the server patched already?)"
    )


def check_startup(server_options: Sequence[str] = ()) -> None:
    """Run the server's `main` with plugins and without a model, until it listens.

    Raises what stopped it. The plugin is kvpersist, with a temporary store, unless
    `server_options` name others.
    """
    plugins = requested_plugins(server_options)
    server = importlib.import_module("mlx_lm.server")
    install(plugins or [PLUGIN])
    stderr = io.StringIO()
    try:
        with tempfile.TemporaryDirectory(prefix="kvpersist-selftest-") as folder:
            own = [] if plugins else ["--plugin", PLUGIN, f"--kvpersist-dir={folder}/store"]
            listen = ["--host=127.0.0.1", "--port=0", "--log-level=ERROR"]
            with (
                mock.patch.object(sys, "argv", ["mlx_lm.server", *listen, *own, *server_options]),
                mock.patch.object(server.ThreadingHTTPServer, "serve_forever", _end_instead),
                contextlib.redirect_stderr(stderr),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")  # stock's, about production use
                server.main()
    except _Listening:
        return
    except SystemExit as end:
        # argparse prints and exits; our own exits carry their cause.
        raise end.__cause__ or SelfTestFailed(stderr.getvalue().strip() or str(end)) from None
    finally:
        uninstall()
    raise SelfTestFailed("the server ended before it listened; expected it to start")


def check_numbers(server_options: Sequence[str] = ()) -> str:
    """Check a tiny model's numbers; return what was compared. Raises as `check_round_trip`."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    args, _ = parser.parse_known_args(server_options)
    choice = precision_of(args)
    with server_attention():
        check_round_trip(choice, args.kvpersist_attention)
    return (
        f"{choice}: sequences that were batched, joined, cancelled, stored and restored have the "
        "logits of mlx-lm's own caches"
    )


class _Listening(BaseException):
    """The server has started and would now wait for requests."""


def _end_instead(server: Any, poll_interval: float = 0.5) -> None:
    """Replace `serve_forever`: close the server and raise _Listening."""
    server.server_close()
    raise _Listening
