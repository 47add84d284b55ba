"""The picture of the README: Claude Code continues after `kill -9` of its server.

`make picture` installs Claude Code from npm and runs it with the real server. The model is tiny and
has random weights. Prompts, caches and speed are real; the replies are written in this file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mlx_lm_kvpersist.api.admin import REQUESTS_PATH, SPEC_PATH, STATS_PATH
from mlx_lm_kvpersist.cli.servers import ask
from mlx_lm_kvpersist.errors import KVPersistError
from tests.support.openblas import openblas_env
from tests.support.scripted import LAUNCHER, call, make_thinking_model

from .terminal import Terminal, picture

_URL = "http://127.0.0.1:8080"
_SERVE = "mlx_lm.server --plugin kvpersist --model tiny 2>> log &"
_NOTE = "The lock at Harrow Weir was built in 1848. Thomas Pell kept it for fifty-three years.\n"
_START_S = 300.0


def draw(programs: Path, folder: Path) -> str:
    """Run the conversation in an empty folder, and return the picture.

    programs: the folder with `claude`. Raises TimeoutError, with the screen, if an expected text
    does not appear.
    """
    work, bin_folder = folder / "work", folder / "bin"
    for each in (work, bin_folder):
        each.mkdir()
    make_thinking_model(work / "tiny", vocab_size=3000, n_layers=2)
    (work / "note.txt").write_text(_NOTE, encoding="utf-8")
    script, launcher, server = folder / "script", folder / "server.py", bin_folder / "mlx_lm.server"
    launcher.write_text(LAUNCHER, encoding="utf-8")
    server.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{launcher}" "$@"\n', encoding="utf-8")
    server.chmod(0o755)
    trusted = {"hasTrustDialogAccepted": True, "hasCompletedProjectOnboarding": True}
    settings = {"hasCompletedOnboarding": True, "theme": "dark", "projects": {str(work): trusted}}
    (folder / ".claude.json").write_text(json.dumps(settings), encoding="utf-8")
    path = (bin_folder, programs, Path(sys.executable).parent, os.environ["PATH"])
    env = {
        "PATH": os.pathsep.join(map(str, path)),
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        "HTTPS_PROXY": "http://127.0.0.1:9",  # Claude Code can reach only the server
        "NO_PROXY": "127.0.0.1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_DISABLE_TERMINAL_TITLE": "1",  # a title would use up a scripted reply
        "DISABLE_AUTOUPDATER": "1",
        "SCRIPTED_REPLIES": str(script),
        "PS1": "$ ",
    }

    def say(*replies: str) -> None:
        script.write_text("\n".join(map(json.dumps, replies)), encoding="utf-8")

    connect = ("mlx-lm-kvpersist", "connect", "claude", "--write")
    with Terminal(["bash", "--norc"], work, {**env, **openblas_env()}) as shell:
        shell.read(2.0)
        shell.type(_SERVE)
        _wait_until_ready()
        subprocess.run(connect, env=env, check=True, stdout=subprocess.DEVNULL)
        with Terminal(["claude"], work, env) as claude:
            claude.read_until(lambda screen: "for shortcuts" in screen)
            say(call("Read", file_path=str(work / "note.txt")), "Thomas Pell kept the lock.")
            requests = [_turn(claude, "Read note.txt. Who kept the lock?")]
            shell.type("kill -9 %1")
            shell.type(_SERVE)
            _wait_until_ready()
            say("For fifty-three years, says note.txt.")
            requests.append(_turn(claude, "For how long?"))
            conversation = claude.text()
        for request in requests:
            shell.type(f"mlx-lm-kvpersist why {request} | sed -n '1s/, session.*//p; $p'")
            shell.read(10.0)
        said = shell.text()
        shell.type("kill %2")
        shell.read(5.0)
    return picture({"claude": conversation, "its server, in another terminal": said})


def _turn(claude: Terminal, question: str) -> str:
    """Wait until the answer is shown and stored; return the id of its first request."""
    n_before = len(_requests())
    claude.type(question)
    claude.read_until(lambda screen: "esc to interrupt" in screen)
    claude.read_until(lambda screen: "esc to interrupt" not in screen)
    claude.read(2.0)
    while ask(_URL, STATS_PATH)["store"]["queue"]["tasks"]:
        claude.read(0.5)
    return str(_requests()[-1 - n_before]["id"])


def _requests() -> list[dict[str, Any]]:
    """Return the running server's requests, the newest first."""
    requests: list[dict[str, Any]] = ask(_URL, REQUESTS_PATH)
    return requests


def _wait_until_ready() -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        time.sleep(0.5)
        try:
            if ask(_URL, SPEC_PATH)["kept"]:
                return
        except KVPersistError:
            continue
    raise TimeoutError("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", type=Path, help="the folder with claude")
    parser.add_argument("file", type=Path, help="the SVG to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="claude-") as folder:
        drawn = draw(args.programs.resolve(), Path(folder).resolve())
    args.file.write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
