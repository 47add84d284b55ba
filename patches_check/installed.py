"""All checks of the mlx-lm that is installed here.

Every check runs in this process with a temporary store, never the user's.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mlx_lm_kvpersist.cli.doctor import Finding, mlx_lm, tried
from mlx_lm_kvpersist.cli.output import console, table
from mlx_lm_kvpersist.cli.selftest import check_numbers, check_patch, check_startup
from mlx_lm_kvpersist.host.patching import versions
from mlx_lm_kvpersist.host.patching.patches import PATCHES, Patch

from .conversation import Conversation, play
from .inventory import Found, bindings, cache_classes


@dataclass
class Report:
    """The checks of one installed mlx-lm. If its version is refused, nothing else is checked."""

    mlx_lm: str
    mlx: str
    python: str
    platform: str
    measured: bool
    """Whether `supported.json` has exactly this pair."""
    versions: Finding
    patches: list[Finding] = field(default_factory=list)
    startup: Finding | None = None
    round_trip: Finding | None = None
    cache_classes: list[Found] = field(default_factory=list)
    bindings: list[Found] = field(default_factory=list)
    conversation: Conversation | None = None
    conversation_check: Finding | None = None

    @property
    def failures(self) -> list[str]:
        checks = [self.versions, *self.patches, self.startup, self.round_trip]
        checks.append(self.conversation_check)
        lines = [f"{one.name}: {one.found}" for one in checks if one and not one.passed]
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
    """`with_conversation` also starts and kills servers."""
    report = Report(
        versions.installed("mlx-lm"),
        versions.installed("mlx"),
        platform.python_version(),
        f"{platform.system()} {platform.machine()}",
        versions.is_measured(),
        mlx_lm(),
    )
    if not report.versions.passed:
        return report
    report.patches = [tried(f"patch {each.name}", partial(check_patch, each)) for each in patches]
    report.startup = tried("startup", check_startup)
    report.round_trip = tried("round trip", check_numbers)
    report.cache_classes, report.bindings = cache_classes(), bindings(patches)
    if with_conversation:
        report.conversation_check = tried("conversation", partial(converse, report))
    return report


def converse(report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix="patches-check-") as folder:
        report.conversation = play(Path(folder))
    report.conversation.check()


def print_report(report: Report) -> None:
    """Faults come last, in full."""
    out = console()
    measured = "" if report.measured else " (not measured)"
    out.print(
        f"mlx-lm {report.mlx_lm}, mlx {report.mlx}{measured}, Python {report.python}, "
        f"{report.platform}"
    )
    if report.patches:
        rows = [[one.name, "ok" if one.passed else "failed"] for one in report.patches]
        out.print(table(["", ""], rows))
    for title, found in (
        ("cache class", report.cache_classes),
        ("patched name", report.bindings),
    ):
        if found:
            out.print()
            rows = [[one.name, one.where, one.said] for one in found]
            out.print(table([title, "where", "treatment"], rows))
    if report.startup is not None and report.startup.passed:
        out.print("\nstartup with the plugin: ok")
    if report.round_trip is not None and report.round_trip.passed:
        out.print(f"round trip: {report.round_trip.found}")
    if report.conversation is not None:
        out.print(f"chat, kill -9, restart, chat: {report.conversation}")
    failures = report.failures
    out.print(f"\nfaults: {len(failures)}")
    for line in failures:
        out.print(line)
