"""All checks of the mlx-lm that is installed here.

Every check runs in this process, and with a temporary store, never the user's.
"""

from __future__ import annotations

import contextlib
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mlx_lm_kvpersist.cli.output import console, print_table
from mlx_lm_kvpersist.cli.selftest import (
    Result,
    check_startup,
    found_version,
    patch_checks,
    timed,
)
from mlx_lm_kvpersist.host.patching import versions
from mlx_lm_kvpersist.host.patching.patch import Patch
from mlx_lm_kvpersist.host.patching.patches import PATCHES

from .conversation import Conversation, play
from .inventory import Found, bindings, cache_classes

PASSED, FAILED, NOT_RUN = "ok", "failed", "-"


@dataclass
class Report:
    """The checks of one installed mlx-lm. Where the versions are refused, there are no others."""

    mlx_lm: str
    mlx: str
    python: str
    platform: str
    measured: bool
    """Whether this very pair is one of those in `supported.json`."""
    versions: Result
    patches: dict[str, list[Result]] = field(default_factory=dict)
    """By patch, its checks up to the first that failed."""
    startup: Result | None = None
    cache_classes: list[Found] = field(default_factory=list)
    bindings: list[Found] = field(default_factory=list)
    conversation: Conversation | None = None
    conversation_check: Result | None = None

    @property
    def failures(self) -> list[str]:
        """The faults, a line each."""
        one_by_one = [self.versions, self.startup, self.conversation_check]
        lines = [f"{one.name}: {one.error}" for one in one_by_one if one and not one.passed]
        for patch, results in self.patches.items():
            lines += [f"patch {patch}, {one.name}: {one.error}" for one in results if one.error]
        lines += [
            f"{found.name} in {found.where}: {found.said}"
            for found in (*self.cache_classes, *self.bindings)
            if not found.is_known
        ]
        return lines

    def to_json(self) -> dict[str, Any]:
        failures = self.failures
        return {**asdict(self), "passed": not failures, "failures": failures}


def examine(patches: Sequence[Patch] = PATCHES, *, with_conversation: bool = False) -> Report:
    """Check what is installed; with a conversation, servers are started and killed."""
    report = Report(
        found_version("mlx-lm"),
        found_version("mlx"),
        platform.python_version(),
        f"{platform.system()} {platform.machine()}",
        versions.is_measured(),
        timed("versions", versions.check),
    )
    if not report.versions.passed:
        return report
    report.patches = {patch.name: check_each(patch) for patch in patches}
    report.startup = timed("startup", partial(check_startup, ("kvpersist",), ()))
    report.cache_classes, report.bindings = cache_classes(), bindings(patches)
    if with_conversation:
        report.conversation_check = timed("conversation", partial(converse, report))
    return report


def check_each(patch: Patch) -> list[Result]:
    """Return the results of a patch's checks, the last of which may have failed."""
    results: list[Result] = []
    with contextlib.closing(patch_checks(patch)) as checks:
        for name, check in checks:
            results.append(timed(name, check))
            if not results[-1].passed:
                break
    return results


def converse(report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix="patches-check-") as folder:
        report.conversation = play(Path(folder))
    report.conversation.check()


def print_report(report: Report) -> None:
    """Print a report as tables; what is wrong comes last, in full."""
    out = console()
    measured = "" if report.measured else " (not measured)"
    out.print(
        f"mlx-lm {report.mlx_lm}, mlx {report.mlx}{measured}, Python {report.python}, "
        f"{report.platform}"
    )
    names = list(dict.fromkeys(one.name for each in report.patches.values() for one in each))
    if report.patches:
        rows = [[patch, *_row(results, names)] for patch, results in report.patches.items()]
        print_table(["patch", *names], rows)
    for title, found in (
        ("cache class", report.cache_classes),
        ("what is patched", report.bindings),
    ):
        if found:
            out.print()
            print_table(
                [title, "where", "what of it"], [[one.name, one.where, one.said] for one in found]
            )
    if report.startup is not None and report.startup.passed:
        out.print("\nstartup with the plugin: ok")
    if report.conversation is not None:
        out.print(f"chat, kill -9, restart, chat: {report.conversation}")
    failures = report.failures
    out.print(f"\n{len(failures) or 'nothing'} wrong")
    for line in failures:
        out.print(line)


def _row(results: list[Result], names: list[str]) -> list[str]:
    by_name = {one.name: PASSED if one.passed else FAILED for one in results}
    return [by_name.get(name, NOT_RUN) for name in names]
