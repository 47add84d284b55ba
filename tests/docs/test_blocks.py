"""All code on a page can be read by the program that it is for."""

from __future__ import annotations

import argparse
import configparser
import importlib.util
import json
import plistlib
import re
import subprocess
import sys
from functools import cache

import pytest
import yaml

from mlx_lm_kvpersist import config
from mlx_lm_kvpersist.cli.main import make_parser
from mlx_lm_kvpersist.host.run import GRACE_S
from tests.support.host import REPOSITORY
from tools.docs.options import leaves

from .blocks import Block, blocks, commands, inline

LANGUAGES = {"", "ini", "json", "python", "sh", "toml", "xml", "yaml"}
OTHER_PROGRAMS = {
    *("claude", "codex", "opencode", "aider", "open-webui"),
    *("apt-get", "export", "mlx.launch", "journalctl", "launchctl", "loginctl"),
    "systemctl",
}
"""Programs that are not ours; their options are not checked."""

SHELL = [(block.page, words) for block in blocks("sh") for words in commands(block)]


def by_program(program: str) -> list[list[str]]:
    return [words for _, words in SHELL if words[0].rpartition("/")[2] == program]


def test_every_block_says_its_language() -> None:
    assert {block.language for block in blocks()} <= LANGUAGES


def test_the_site_shows_every_line_of_code_at_full_width() -> None:
    """plugins.md shows the hooks as they are in the source; see tests/host/test_docs.py."""
    pages = {page.name for page in (REPOSITORY / "docs").glob("*.md")}
    shown = [b for b in blocks() if b.page in pages and "@hookspec" not in b.text]
    assert len(shown) >= 40
    wide = [(b.page, line) for b in shown for line in b.text.splitlines() if len(line) > 80]
    assert wide == []


def test_every_program_is_known() -> None:
    known = {"curl", "make", "mlx-lm-kvpersist", "mlx_lm.server", "pip", "python", "pipx", "uv"}
    known |= {".", "cd", "git", "python3", "uvx"}
    assert {words[0].rpartition("/")[2] for _, words in SHELL} <= known | OTHER_PROGRAMS


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.page)
def test_python(block: Block) -> None:
    compile(block.text, block.page, "exec")


@pytest.mark.parametrize("block", [*blocks("json"), *blocks("yaml"), *blocks("toml")])
def test_settings(block: Block) -> None:
    if block.language == "toml":
        if sys.version_info < (3, 11):
            pytest.skip("Python 3.10 cannot read TOML")
        import tomllib

        assert tomllib.loads(block.text)
    else:
        read = json.loads if block.language == "json" else yaml.safe_load
        assert read(block.text)


def test_services_start_the_server_and_start_it_again() -> None:
    (unit,), (agent,) = blocks("ini"), blocks("xml")
    read = configparser.ConfigParser(interpolation=None)
    read.optionxform = str  # type: ignore[assignment, method-assign]
    read.read_string(unit.text)
    service = read["Service"]
    assert service["Restart"] == "on-failure"
    plist = plistlib.loads(agent.text.strip().encode())
    assert plist["KeepAlive"] == {"SuccessfulExit": False} and plist["RunAtLoad"]
    # The longest time that a server may take to end, by host/run.py.
    assert int(service["TimeoutStopSec"]) == plist["ExitTimeOut"] > GRACE_S + 10
    assert int(service["UMask"], 8) == plist["Umask"] == 0o77
    assert plist["ProcessType"] == "Interactive"  # else launchd throttles
    for words in (service["ExecStart"].split(), plist["ProgramArguments"]):
        assert words[0].endswith("/mlx/bin/mlx_lm.server")
        check_server(words[1:])


@cache
def stock_help() -> str:
    command = [sys.executable, "-m", "mlx_lm.server", "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def check_server(options: list[str]) -> None:
    """Parse the plugin's options, and look for other options in the stock server's help."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plugin", choices=["kvpersist"])
    config.add_options(parser)
    _, others = parser.parse_known_args([word for word in options if word != "…"])
    unknown = [word for word in others if word.startswith("--") and word not in stock_help()]
    assert unknown == []


def test_the_server_knows_its_options() -> None:
    found = by_program("mlx_lm.server")
    assert len(found) >= 2
    for words in found:
        check_server(words[1:])


def test_commands_in_blocks_parse() -> None:
    found = by_program("mlx-lm-kvpersist")
    assert len(found) >= 10
    for words in found:
        make_parser().parse_args(words[1:])


def test_commands_within_text_parse() -> None:
    """Or are the beginning of one, such as `mlx-lm-kvpersist sessions`."""
    names = {" ".join(path.split()[:n]) for path, _ in leaves(make_parser()) for n in (1, 2)}
    found = [code for _, _, code in inline() if code.startswith("mlx-lm-kvpersist ")]
    assert len(found) >= 30
    for code in found:
        words = [word for word in code.split()[1:] if word not in ("…", "COMMAND")]
        if " ".join(words) in names or not words:
            continue
        if words[0] == "server":
            check_server(words[1:])
        else:
            make_parser().parse_args(words)


def test_options_within_text_exist() -> None:
    """Values, too: `--kvpersist-disk 20G`."""
    found = [code.split() for _, _, code in inline() if code.startswith("--kvpersist-")]
    assert len(found) >= 50
    for words in found:
        given = [word for word in words if not re.fullmatch(r"[A-Z]{2,}|\{.*\}|…", word)]
        if len(given) < len(words) or len(words) == 1:
            assert given[0] in option_names(), words
        else:
            check_server(words)


@cache
def option_names() -> frozenset[str]:
    parser = argparse.ArgumentParser()
    config.add_options(parser)
    return frozenset(name for action in parser._actions for name in action.option_strings)


def test_make_and_modules() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    within = [code.split() for _, _, code in inline() if code.startswith("make ")]
    asked = [next(w for w in words[1:] if "=" not in w) for words in within + by_program("make")]
    assert len(asked) >= 5 and set(asked) <= targets
    within = [code.split() for _, _, code in inline() if code.startswith("python -m ")]
    modules = [words[2] for words in within + by_program("python") if words[1] == "-m"]
    assert len(modules) >= 5
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_what_is_installed_is_this_package() -> None:
    """By every route that a page names."""
    installs = re.compile(r"(pip install|uv tool install|pipx inject)\b(.*)")
    lines = [code for _, _, code in inline()] + [b.text for b in blocks("sh")]
    found = [line[2] for text in lines for line in installs.finditer(text)]
    assert len(found) >= 8
    address = r"git\+https://github\.com/mlx-lm-kvpersist/mlx-lm-kvpersist"
    known = re.compile(rf"mlx-lm-kvpersist(\[cpu\])?|mlx-lm([<>=][0-9.,<>=]+)?|{address}|\.\[cpu\]")
    for rest in found:
        words = re.sub(r"[\"'’‘]", "", rest).split("#")[0].split()
        packages = [word for word in words if not word.startswith("-")]
        for package in packages:
            assert known.fullmatch(package) or package in ("bench", ".", "smg"), rest
