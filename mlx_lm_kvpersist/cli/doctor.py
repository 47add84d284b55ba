"""`mlx-lm-kvpersist doctor`: does `mlx_lm.server --plugin kvpersist` work here, and if not, why.

mlx is not imported, because a broken MLX must be reported and must not end the command.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import site
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from ..api.admin import SPEC_PATH
from ..config import default_folder
from ..errors import KVPersistError, UnsupportedVersion
from ..host import manager
from ..host.patching import versions
from ..units import show_bytes
from . import servers
from .machine import openblas_advice
from .output import Report, counted

PLUGIN = "kvpersist"
INSTALL = f"{shlex.quote(sys.executable)} -m pip install"
AGAIN = f"{INSTALL} --force-reinstall mlx-lm-kvpersist"
PTH_NAME = "mlx_lm_kvpersist.pth"
WITHOUT_PTH = "mlx-lm-kvpersist server …, which needs no .pth file"
MACHINE = f"{__package__}.machine"
PORT = 8080


@dataclass(frozen=True)
class Finding:
    """The result of a check, and what to do if the plugin does not work or is slow."""

    name: str
    passed: bool
    found: str
    advice: str = ""


def tried(name: str, check: Callable[[], str | None], advice: str = "") -> Finding:
    """Run a check; the result None means "works". If it raises, the finding has `advice`."""
    try:
        result = check() or "works"
    except KVPersistError as error:
        return Finding(name, False, str(error), advice)
    except Exception as error:
        return Finding(name, False, f"{type(error).__name__}: {error}", advice)
    return Finding(name, True, result)


def package() -> Finding:
    folder = Path(__file__).resolve().parent.parent
    place = f"{folder}, for Python {sys.version.split()[0]} at {sys.executable}"
    try:
        version = metadata.version("mlx-lm-kvpersist")
    except metadata.PackageNotFoundError:
        observed = f"imported from {place}: not installed"
        return Finding("mlx-lm-kvpersist", False, observed, f"{INSTALL} mlx-lm-kvpersist")
    return Finding("mlx-lm-kvpersist", True, f"{version} at {place}")


def mlx_lm() -> Finding:
    try:
        versions.check()
        lm, mlx = versions.installed("mlx-lm"), versions.installed("mlx")
    except UnsupportedVersion as error:
        observed, _, advice = str(error).rpartition("; ")
        return Finding("mlx-lm", False, observed, advice)
    note = "" if versions.is_measured() else ", a pair that was not measured"
    return Finding("mlx-lm", True, f"{lm} with mlx {mlx}{note}")


def mlx() -> Finding:
    """Check that MLX computes, in a separate process because MLX can abort."""
    status, output = ask([sys.executable, "-m", MACHINE])
    advice = (
        "on macOS use a native (arm64) Python on Apple silicon; "
        "on Linux install a backend: pip install 'mlx[cpu]', or mlx[cuda12], mlx[cuda13]"
    )
    if status != 0:
        return Finding("mlx", False, f"does not compute: {output or f'status {status}'}", advice)
    try:
        device, gflops = json.loads(output.rpartition("\n")[2])  # other output may come first
    except (TypeError, ValueError):
        return Finding("mlx", False, f"says {output!r} instead of its device", advice)
    observed = f"computes on {device}" + (f", {gflops:.3g} GFLOP/s" if gflops else "")
    advice = openblas_advice(gflops)
    slow = ": prompts take many times as long as with OpenBLAS" if advice else ""
    return Finding("mlx", True, f"{observed}{slow}", advice)


def pth_file(folders: Sequence[str]) -> Finding:
    paths = [Path(folder, PTH_NAME) for folder in folders]
    path = next((path for path in paths if path.is_file()), None)
    observed, advice = str(path), ""
    if path is None:
        observed = f"{PTH_NAME} is in none of {', '.join(folders)}"
        advice = f"{AGAIN} (not with --target), or run {WITHOUT_PTH}"
    elif getattr(path.stat(), "st_flags", 0) & stat.UF_HIDDEN:
        observed = f"{path} has the macOS flag `hidden`, and Python ignores hidden .pth files"
        advice = f"chflags nohidden {shlex.quote(str(path))}, or run {WITHOUT_PTH}"
    elif "mlx_lm_kvpersist._startup" not in path.read_text(encoding="utf-8"):
        observed, advice = f"{path} does not start the plugin", AGAIN
    return Finding(".pth file", not advice, observed, advice)


def activation(name: str, command: Sequence[str]) -> Finding:
    status, output = ask([*command, f"--plugin={PLUGIN}", "--help"])
    if status == 0 and "--kvpersist-dir" in output:
        return Finding(name, True, f"{shlex.join(command)} knows --plugin")
    observed = f"{shlex.join(command)} failed: {output or f'status {status}'}"
    if status == 0:
        observed = f"{shlex.join(command)} does not know --plugin: no {PTH_NAME} was executed"
    advice = (
        "install mlx-lm-kvpersist beside mlx-lm: pip install mlx-lm-kvpersist in that command's "
        f"environment, or uv tool install mlx-lm --with mlx-lm-kvpersist; or run {WITHOUT_PTH}"
    )
    return Finding(name, False, observed, advice)


def script() -> Finding:
    """Check the `mlx_lm.server` that a shell starts, which may belong to another environment."""
    name = "mlx_lm.server on PATH"
    if path := shutil.which("mlx_lm.server"):
        return activation(name, [path])
    return Finding(name, True, f"none; start it as {server_command()} …")


def store(folder: Path, key: Path | None = None) -> Finding:
    """Check with `store stats` that the server can use a folder; `key` is the store's key file."""
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not os.access(existing, os.W_OK | os.X_OK):
        advice = "choose a folder of your own with --kvpersist-dir"
        return Finding("store", False, f"{existing} cannot be written to", advice)
    if existing != folder or (folder.is_dir() and not any(folder.iterdir())):
        return Finding("store", True, f"none yet; the server makes it in {folder}")
    name = __package__.partition(".")[0]
    options = ["store", "stats", "--json", "--kvpersist-dir", str(folder)]
    options += ["--kvpersist-encrypt", str(key)] if key else []
    status, output = ask([sys.executable, "-m", name, *options])
    if status == 0:
        stats = json.loads(output)
        found = [
            f"{each['folder']}: {counted(each['sessions'], 'session')}, "
            f"{show_bytes(each['bytes']['all'])} of {show_bytes(each['max_disk_bytes'])}"
            for each in ([stats] if "folder" in stats else stats.values())  # a store for each rank
        ]
        return Finding("store", True, "; ".join(found))
    observed, _, advice = output.partition(": ")[2].partition("; ")
    if "store rebuild" in advice:
        return Finding("store", True, f"{observed}; the server rebuilds it when it starts")
    return Finding("store", False, observed, advice)


def running(start: str) -> tuple[Finding, str]:
    """Check the default port. Also return the next command: `start` or `connect`."""
    name, url = f"port {PORT}", f"http://127.0.0.1:{PORT}"
    start = f"{start} --model mlx-community/Qwen3-8B-4bit"
    try:
        socket.create_connection(("127.0.0.1", PORT), timeout=2.0).close()
    except OSError:
        return Finding(name, True, "free for the server"), start
    try:
        model = servers.ask(url, SPEC_PATH)["model"]
    except (KVPersistError, KeyError, TypeError) as error:
        return Finding(name, True, f"taken: {error}"), f"{start} --port {PORT + 1}"
    observed = f"a server with the plugin runs there, with {model or 'no model yet'}"
    return Finding(name, True, observed), "mlx-lm-kvpersist connect claude --write"


def server_command() -> str:
    found = shutil.which("mlx_lm.server")
    return "mlx_lm.server" if found else f"{shlex.quote(sys.executable)} -m mlx_lm server"


def ask(command: Sequence[str]) -> tuple[int, str]:
    """Run a command; return its status and its stdout, or the last line of stderr if it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, str(error)
    if done.returncode == 0:
        return 0, done.stdout.strip()
    return done.returncode, done.stderr.strip().rpartition("\n")[2]


def run(args: argparse.Namespace) -> Report:
    """Check what `--plugin` needs, causes before effects; then check the store and the port."""
    command, folder = f"{server_command()} --plugin {PLUGIN}", args.kvpersist_dir
    where = f" --kvpersist-dir {shlex.quote(str(folder))}" if folder else ""
    port, following = running(command + where)
    # The folders whose .pth files Python executes.
    folders = site.getsitepackages() + [site.getusersitepackages()] * bool(site.ENABLE_USER_SITE)
    find = manager.find_entry_point
    findings = [
        package(),
        mlx_lm(),
        mlx(),
        tried("plugin", lambda: f"{PLUGIN} is {find(PLUGIN).value}", AGAIN),
        pth_file(folders),
        activation("activation in this Python", [sys.executable, "-m", "mlx_lm", "server"]),
        script(),
        store((folder or default_folder()).absolute(), args.kvpersist_encrypt),
        port,
    ]
    return report(findings, command, following)


def report(findings: Sequence[Finding], command: str, following: str) -> Report:
    """Return the findings and the next command, which is `following` if all checks passed."""
    lines = []
    for finding in findings:
        mark = "no" if not finding.passed else "slow" if finding.advice else "ok"
        lines.append(f"{mark:<6}{finding.name}: {finding.found}")
    broken = next((finding for finding in findings if not finding.passed), None)
    if broken is not None:
        lines.append(f"{command} does not work here: {broken.name}: {broken.found}")
        lines.append(f"Next: {broken.advice or 'mlx-lm-kvpersist doctor'}")
    else:
        lines.append(f"{command} works here.")
        lines += [f"Faster: {finding.advice}" for finding in findings if finding.advice]
        lines.append(f"Next: {following}")
    content = {"works": broken is None, "findings": [asdict(finding) for finding in findings]}
    return Report(content, *lines, status=int(broken is not None))
