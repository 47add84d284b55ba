"""Clients are told of the server, and nothing that their files say is lost."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlx_lm_kvpersist.cli.connect import CLIENTS
from mlx_lm_kvpersist.cli.main import main, make_parser

from .test_docs import subcommands

URL = "http://127.0.0.1:8123"
FILES = {
    "claude": ".claude/settings.json",
    "codex": ".codex/kvpersist.config.toml",
    "opencode": ".config/opencode/opencode.json",
    "aider": ".aider.conf.yml",
}
SETTINGS = """\
{
    "$schema": "https://example.com/settings.json",
    "permissions": {"allow": ["Bash(ls:*)"]},
    "env": {"ANTHROPIC_BASE_URL": "https://gateway.example", "OTHER": "ü"},
    "model": "opus"
}
"""
AIDER = """\
# mine
model: gpt-5   # until Friday
read:
  - CONVENTIONS.md
dark-mode: true"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def connect(client: str, *options: str) -> int:
    return main(["connect", client, "--port", "8123", *options])


def backups(file: Path) -> list[str]:
    return [path.read_text() for path in sorted(file.parent.glob(f"{file.name}.bak*"))]


def read(file: Path) -> Any:
    text = file.read_text()
    if file.suffix == ".toml":
        import tomllib

        return tomllib.loads(text)
    return yaml.safe_load(text)  # JSON is YAML


def test_the_page_and_the_parser_know_every_client(home: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")
    for name, file in FILES.items():
        client = CLIENTS[name](URL)
        assert client.file == home / file
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert f"| `~/{file}`" in row and row.endswith(f"| `{client.start}` |")
    action = next(a for a in subcommands(make_parser())["connect"]._actions if a.choices)
    assert tuple(action.choices or ()) == tuple(CLIENTS)
    assert FILES.keys() | {"openwebui"} == CLIENTS.keys()


@pytest.mark.parametrize("client", [*FILES, "openwebui"])
def test_printing_touches_nothing(
    client: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert connect(client) == 0
    out = capsys.readouterr().out
    assert URL in out and "Start it:" in out and not list(home.iterdir())
    words = shlex.split(out.strip().splitlines()[-1])  # a command that a shell can read
    assert any(URL in word for word in words)


def test_what_each_client_reads(home: Path) -> None:
    for client, file in FILES.items():
        if client == "codex" and sys.version_info < (3, 11):
            continue
        assert connect(client, "--write") == 0
        path = home / file
        assert path.stat().st_mode & 0o777 == 0o600 and backups(path) == []
    env = read(home / FILES["claude"])["env"]
    assert (env["ANTHROPIC_BASE_URL"], env["ANTHROPIC_MODEL"]) == (URL, "claude-local")
    provider = read(home / FILES["opencode"])["provider"]["kvpersist"]
    assert provider["options"] == {"baseURL": f"{URL}/v1"} and "default_model" in provider["models"]
    aider = read(home / FILES["aider"])
    assert (aider["openai-api-base"], aider["model"]) == (f"{URL}/v1", "openai/default_model")
    if sys.version_info >= (3, 11):
        codex = read(home / FILES["codex"])
        provider = codex["model_providers"][codex["model_provider"]]
        assert (provider["base_url"], provider["wire_api"]) == (f"{URL}/v1", "responses")


def test_json_is_merged(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real, file = home / "dotfiles.json", home / FILES["claude"]
    file.parent.mkdir()
    file.symlink_to(real)
    real.write_text(SETTINGS)
    real.chmod(0o640)
    assert connect("claude", "--write") == 0
    said = capsys.readouterr().out
    assert f'+        "ANTHROPIC_BASE_URL": "{URL}",' in said and "gateway.example" in said
    before, after = json.loads(SETTINGS), json.loads(real.read_text())
    assert list(after) == list(before) and list(after["env"])[:2] == ["ANTHROPIC_BASE_URL", "OTHER"]
    assert after["env"].pop("ANTHROPIC_BASE_URL") == URL
    for name in ("ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"):
        del after["env"][name]
    assert after == {**before, "env": {"OTHER": "ü"}}
    assert file.is_symlink() and real.stat().st_mode & 0o777 == 0o640
    assert backups(real) == [SETTINGS] and f"{real}.bak1" in said
    written = real.read_bytes()
    assert connect("claude", "--write") == 0
    assert "says all of it already" in capsys.readouterr().out
    assert real.read_bytes() == written and len(backups(real)) == 1
    assert main(["connect", "claude", "--write"]) == 0  # another port
    assert json.loads(real.read_text())["env"]["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8080"
    assert backups(real) == [SETTINGS, written.decode()]


def test_lines_are_merged(home: Path) -> None:
    file = home / FILES["aider"]
    file.write_text(AIDER)
    assert connect("aider", "--write") == 0
    assert file.read_text().splitlines() == [
        "# mine",
        "model: openai/default_model  # until Friday",
        "read:",
        "  - CONVENTIONS.md",
        "dark-mode: true",
        f"openai-api-base: {URL}/v1",
        "openai-api-key: none",
    ]
    assert backups(file) == [AIDER]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 cannot read TOML")
def test_codex_keeps_what_was_added_to_its_profile(home: Path) -> None:
    assert main(["connect", "codex", "--write"]) == 0
    file = home / FILES["codex"]
    own = 'sandbox_mode = "read-only" # mine\n'
    file.write_text(own + file.read_text() + "[tui]\nnotifications = true\n")
    before = read(file)
    assert connect("codex", "--write") == 0
    before["model_providers"]["kvpersist"]["base_url"] = f"{URL}/v1"
    assert read(file) == before and file.read_text().startswith(own)


@pytest.mark.parametrize(
    ("client", "there", "why"),
    [
        ("opencode", '{\n  // mine\n  "theme": "dark"\n}\n', "Expecting property name"),
        ("claude", '{"env": ["A=b"]}', "where keys and values were expected"),
        ("claude", "[]", "where keys and values were expected"),
        ("aider", "model:\n  - a\n  - b\n", "cannot be merged"),
        ("aider", "a: [", "it is no YAML"),
        ("codex", '[model_providers.kvpersist]\nname = "x"\n', "TOML|cannot be merged"),
        ("openwebui", None, "no configuration file; start it with: OPENAI_API_BASE_URL="),
    ],
)
def test_what_cannot_be_merged_is_left_alone(
    client: str, there: str | None, why: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if there is not None:
        file = home / FILES[client]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(there)
    assert connect(client, "--write") == 1
    out, err = capsys.readouterr()
    assert any(each in err for each in why.split("|")) and err.count("\n") == 1
    if there is not None:
        assert file.read_text() == there and backups(file) == []
        assert URL in out and "by hand" in err


def test_folders_of_the_users_choice(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(home / "c"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "x"))
    assert connect("claude", "--write") == connect("opencode", "--write") == 0
    assert (home / "c" / "settings.json").exists()
    assert (home / "x" / "opencode" / "opencode.json").exists()
