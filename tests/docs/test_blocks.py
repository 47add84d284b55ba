"""The code on the pages is valid for the program that reads it."""

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

from .blocks import Block, blocks, commands, inline_code

LANGUAGES = {"", "ini", "json", "python", "sh", "toml", "xml", "yaml"}
OTHER_PROGRAMS = {
    *("claude", "codex", "opencode", "aider", "open-webui"),
    *("apt-get", "export", "mlx.launch", "journalctl", "launchctl", "loginctl"),
    "systemctl",
}
"""Programs that are not ours; their options are not checked."""

SHELL = [(block.page, words) for block in blocks("sh") for words in commands(block)]


def commands_of(program: str) -> list[list[str]]:
    return [words for _, words in SHELL if words[0].rpartition("/")[2] == program]


def test_blocks_have_a_known_language() -> None:
    assert {block.language for block in blocks()} <= LANGUAGES


def test_lines_of_blocks_fit_the_width_of_the_site() -> None:
    """plugins.md copies the hooks from the source; see tests/host/test_docs.py."""
    pages = {page.name for page in (REPOSITORY / "docs").glob("*.md")}
    site_blocks = [
        block for block in blocks() if block.page in pages and "@hookspec" not in block.text
    ]
    assert len(site_blocks) >= 40
    wide = [
        (block.page, line)
        for block in site_blocks
        for line in block.text.splitlines()
        if len(line) > 80
    ]
    assert wide == []


def test_shell_blocks_run_known_programs() -> None:
    known = {"curl", "make", "mlx-lm-kvpersist", "mlx_lm.server", "pip", "python", "pipx", "uv"}
    known |= {".", "cd", "git", "python3", "uvx"}
    assert {words[0].rpartition("/")[2] for _, words in SHELL} <= known | OTHER_PROGRAMS


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.page)
def test_python_blocks_compile(block: Block) -> None:
    compile(block.text, block.page, "exec")


@pytest.mark.parametrize("block", [*blocks("json"), *blocks("yaml"), *blocks("toml")])
def test_json_yaml_and_toml_blocks_parse(block: Block) -> None:
    if block.language == "toml":
        if sys.version_info < (3, 11):
            pytest.skip("Python 3.10 cannot read TOML")
        import tomllib

        assert tomllib.loads(block.text)
    else:
        read = json.loads if block.language == "json" else yaml.safe_load
        assert read(block.text)


def test_service_files_start_and_restart_the_server() -> None:
    (unit,), (agent,) = blocks("ini"), blocks("xml")
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(unit.text)
    service = parser["Service"]
    assert service["Restart"] == "on-failure"
    plist = plistlib.loads(agent.text.strip().encode())
    assert plist["KeepAlive"] == {"SuccessfulExit": False} and plist["RunAtLoad"]
    # host/run.py: the longest time that a server may take to end.
    assert int(service["TimeoutStopSec"]) == plist["ExitTimeOut"] > GRACE_S + 10
    assert int(service["UMask"], 8) == plist["Umask"] == 0o77
    assert plist["ProcessType"] == "Interactive"  # otherwise launchd throttles the server
    for words in (service["ExecStart"].split(), plist["ProgramArguments"]):
        assert words[0].endswith("/mlx/bin/mlx_lm.server")
        check_server_options(words[1:])


@cache
def stock_help() -> str:
    command = [sys.executable, "-m", "mlx_lm.server", "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def check_server_options(options: list[str]) -> None:
    """Parse the plugin's options, and look for other options in the stock server's help."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plugin", choices=["kvpersist"])
    config.add_options(parser)
    _, others = parser.parse_known_args([word for word in options if word != "…"])
    unknown = [word for word in others if word.startswith("--") and word not in stock_help()]
    assert unknown == []


def test_server_commands_in_blocks_have_valid_options() -> None:
    command_lines = commands_of("mlx_lm.server")
    assert len(command_lines) >= 2
    for words in command_lines:
        check_server_options(words[1:])


def test_commands_in_blocks_parse() -> None:
    command_lines = commands_of("mlx-lm-kvpersist")
    assert len(command_lines) >= 10
    for words in command_lines:
        make_parser().parse_args(words[1:])


def test_inline_commands_parse() -> None:
    """A text may also name a group alone, such as `mlx-lm-kvpersist sessions`."""
    names = {" ".join(path.split()[:n]) for path, _ in leaves(make_parser()) for n in (1, 2)}
    codes = [code for _, _, code in inline_code() if code.startswith("mlx-lm-kvpersist ")]
    assert len(codes) >= 30
    for code in codes:
        words = [word for word in code.split()[1:] if word not in ("…", "COMMAND")]
        if " ".join(words) in names or not words:
            continue
        if words[0] == "server":
            check_server_options(words[1:])
        else:
            make_parser().parse_args(words)


def test_inline_options_exist() -> None:
    """Their values are parsed, too: `--kvpersist-disk 20G`."""
    codes = [code.split() for _, _, code in inline_code() if code.startswith("--kvpersist-")]
    assert len(codes) >= 50
    for words in codes:
        concrete = [word for word in words if not re.fullmatch(r"[A-Z]{2,}|\{.*\}|…", word)]
        if len(concrete) < len(words) or len(words) == 1:
            assert concrete[0] in option_names(), words
        else:
            check_server_options(words)


@cache
def option_names() -> frozenset[str]:
    parser = argparse.ArgumentParser()
    config.add_options(parser)
    return frozenset(name for action in parser._actions for name in action.option_strings)


def test_make_targets_and_python_modules_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    inline_commands = [code.split() for _, _, code in inline_code() if code.startswith("make ")]
    used_targets = [
        next(w for w in words[1:] if "=" not in w)
        for words in inline_commands + commands_of("make")
    ]
    assert len(used_targets) >= 5 and set(used_targets) <= targets
    inline_commands = [
        code.split() for _, _, code in inline_code() if code.startswith("python -m ")
    ]
    modules = [words[2] for words in inline_commands + commands_of("python") if words[1] == "-m"]
    assert len(modules) >= 5
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_install_commands_name_known_packages() -> None:
    """Installers are pip, uv and pipx."""
    installs = re.compile(r"(pip install|uv tool install|pipx inject)\b(.*)")
    lines = [code for _, _, code in inline_code()] + [b.text for b in blocks("sh")]
    arguments = [line[2] for text in lines for line in installs.finditer(text)]
    assert len(arguments) >= 8
    address = r"git\+https://github\.com/mlx-lm-kvpersist/mlx-lm-kvpersist"
    known_package = re.compile(
        rf"mlx-lm-kvpersist(\[cpu\])?|mlx-lm([<>=][0-9.,<>=]+)?|{address}|\.\[cpu\]"
    )
    for rest in arguments:
        words = re.sub(r"[\"'’‘]", "", rest).split("#")[0].split()
        packages = [word for word in words if not word.startswith("-")]
        for package in packages:
            assert known_package.fullmatch(package) or package in ("bench", ".", "smg"), rest
