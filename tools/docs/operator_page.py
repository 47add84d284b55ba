"""`python -m tools.docs.operator_page docs/page.png`: take the picture of the operator's page.

A real server with SmolLM2-135M is killed between two turns. The requests look like requests of
known clients. The script needs SmolLM2 (`python -m tests.support.synthetic.smollm2`), Chromium and
OpenBLAS.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from mlx_lm_kvpersist.api.admin import STATS_PATH
from mlx_lm_kvpersist.cli.servers import ask
from tests.support import ServerProcess, chromium
from tests.support.openblas import openblas_env
from tests.support.synthetic import Message, synthetic_text
from tests.support.synthetic.smollm2 import make_smollm2

_SYSTEM: Message = {"role": "system", "content": synthetic_text(1500, seed=1)}
_TALKS = {
    "Refactor the parser so that it reports the line of an error": {
        "User-Agent": "claude-cli/2.1.0",
        "x-claude-code-session-id": "386d61b8-91d0-4b5c-a1ce-9f4f8ad9ce11",
    },
    "Why is the build slow since Monday?": {
        "User-Agent": "codex_cli_rs/0.60.0",
        "session_id": "0199f3a2-7c1e-74d3-9a55-2b24a3630b1c",
    },
    "Find the leak in the worker pool": {
        "User-Agent": "opencode/1.2.0",
        "X-Session-ID": "ses_5b1fd2",
    },
    "Write the release notes for 2.4": {
        "User-Agent": "OpenAI/Python 2.1.0",
        "X-Session-ID": "release notes",
    },
}
"""The first question of each conversation, and the headers of its client."""


def play(server: ServerProcess) -> None:
    talks: dict[str, list[Message]] = {question: [_SYSTEM] for question in _TALKS}
    for turn in range(4):
        for question, messages in talks.items():
            text = question if turn == 0 else f"And then? {synthetic_text(300, seed=turn)}"
            messages.append({"role": "user", "content": text})
            reply = server.chat(messages, headers=_TALKS[question], max_tokens=24)
            messages.append({"role": "assistant", "content": reply.text})
        if turn == 0:
            wait_for_writer(server)
            server.kill9()
            server.start()
    wait_for_writer(server)


def wait_for_writer(server: ServerProcess) -> None:
    url = f"http://127.0.0.1:{server.port}"
    while ask(url, STATS_PATH)["store"]["queue"]["tasks"]:
        time.sleep(0.1)


def take_picture(url: str, path: Path) -> None:
    """Write a PNG of the page as soon as the page shows the requests."""
    browser_path = chromium.find()
    if browser_path is None:
        raise SystemExit(f"Chromium was not found: {chromium.HOW}")
    env: dict[str, str | float | bool] = {**os.environ, **browser_path.env}
    with sync_playwright() as playwright:
        with playwright.chromium.launch(
            executable_path=browser_path.path, env=env, args=["--no-sandbox"], timeout=60_000
        ) as browser:
            page = browser.new_page(viewport={"width": 1100, "height": 860})
            page.goto(f"{url}/kvpersist")
            page.locator(".request").first.wait_for()
            page.locator(".session").first.wait_for()
            page.screenshot(path=path)


def main() -> None:
    (target,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        model = make_smollm2(Path(folder) / "SmolLM2-135M-Instruct")
        options = ("--plugin", "kvpersist", "--kvpersist-dir", f"{folder}/store")
        more = ("--kvpersist-show-text", "--kvpersist-memory", "1G")
        with ServerProcess(model, *options, *more, env=openblas_env()) as server:
            play(server)
            take_picture(f"http://127.0.0.1:{server.port}", Path(target))


if __name__ == "__main__":
    main()
