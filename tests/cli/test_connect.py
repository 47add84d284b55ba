"""Clients get the server's settings, and nothing in their files is lost."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from mlx_lm_kvpersist.cli import connect as connecting
from mlx_lm_kvpersist.cli.connect import CLIENTS, ROUTER
from mlx_lm_kvpersist.cli.main import main, make_parser

from .test_docs import subcommands

URL = "http://127.0.0.1:8123"
FILES = {
    "claude": ".claude/kvpersist.json",
    "codex": ".codex/kvpersist.config.toml",
    "opencode": ".config/opencode/opencode.json",
    "aider": ".aider.kvpersist.json",
}
GLOBAL = ".claude/settings.json"
SETTINGS = """\
{
    "$schema": "https://example.com/settings.json",
    "permissions": {"allow": ["Bash(ls:*)"]},
    "env": {"ANTHROPIC_BASE_URL": "https://gateway.example", "OTHER": "ü"},
    "model": "opus"
}
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def connect(client: str, *options: str) -> int:
    return main(["connect", client, "--port", "8123", *options])


def connect_claude_globally(*options: str) -> int:
    return connect("claude", "--global", "--write", *options)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, by their paths."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def modes_and_bytes(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    """Return the mode of each file and folder in a folder, and the bytes of each file."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mode,
            path.read_bytes() if path.is_file() else None,
        )
        for path in folder.rglob("*")
    }


def read(file: Path) -> Any:
    text = file.read_text()
    if file.suffix == ".toml":
        import tomllib

        return tomllib.loads(text)
    return json.loads(text)


def test_clients_page_and_parser_list_every_client(home: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")
    for name, file in FILES.items():
        client = CLIENTS[name](URL, None)
        assert list(client.files) == [home / file]
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        start = client.start.replace(str(home), "~")
        assert f"| `~/{file}`" in row and row.endswith(f"| `{start}` |")
    action = next(a for a in subcommands(make_parser())["connect"]._actions if a.choices)
    assert tuple(action.choices or ()) == (*CLIENTS, ROUTER)
    assert FILES.keys() | {"openwebui"} == CLIENTS.keys()


@pytest.mark.parametrize("client", [*FILES, "openwebui"])
def test_without_write_the_settings_are_only_printed(
    client: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert connect(client) == 0
    out = capsys.readouterr().out
    assert URL in out and not list(home.iterdir())
    if client in ("claude", "openwebui"):
        words = shlex.split(out.strip().splitlines()[-1])  # a command that a shell can read
        assert any(URL in word for word in words)


def test_written_settings_have_the_servers_address_and_model(home: Path) -> None:
    for client, file in FILES.items():
        assert connect(client, "--write") == 0
        path = home / file
        assert path.stat().st_mode & 0o777 == 0o600
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


def test_router_requires_the_same_model_name_on_all_servers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"http://mac-1:8080": "team", "http://mac-2:8080": "team", "http://mac-3:8080": "/m"}
    monkeypatch.setattr(
        connecting, "ask", lambda url, path: {"data": [{"id": names[url]}] if url in names else []}
    )
    servers = ("--server", "mac-1:8080", "--server", "http://mac-2:8080/")
    assert connect("router", *servers) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[:2] == ["smg", "launch"] and words[-2:] == list(names)[:2]
    assert words.count("--model-alias") == 2 and "default_model=team" in words
    assert connect("router", *servers, "--server", "mac-3:8080") == 1
    assert "http://mac-3:8080 has /m" in capsys.readouterr().err
    assert connect("router") == 1  # the only server is at --port
    assert f"{URL} lists no model" in capsys.readouterr().err
    assert connect("claude", *servers) == 1
    assert "--port" in capsys.readouterr().err


def test_settings_are_merged_into_a_json_file(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real, file = home / "dotfiles.json", home / GLOBAL
    file.parent.mkdir()
    file.symlink_to(real)
    real.write_text(SETTINGS)
    real.chmod(0o640)
    assert connect_claude_globally() == 0
    output = capsys.readouterr().out
    assert f'+        "ANTHROPIC_BASE_URL": "{URL}",' in output and "gateway.example" in output
    assert "every project of claude uses this server" in output
    before, after = json.loads(SETTINGS), json.loads(real.read_text())
    assert list(after) == list(before) and list(after["env"])[:2] == ["ANTHROPIC_BASE_URL", "OTHER"]
    assert after["env"].pop("ANTHROPIC_BASE_URL") == URL
    for name in ("ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"):
        del after["env"][name]
    assert after == {**before, "env": {"OTHER": "ü"}}
    assert file.is_symlink() and real.stat().st_mode & 0o777 == 0o640
    written = real.read_bytes()
    assert connect_claude_globally() == 0
    assert "already has all settings" in capsys.readouterr().out
    assert real.read_bytes() == written
    assert connect_claude_globally("--port", "8080") == 0
    assert json.loads(real.read_text())["env"]["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8080"


def test_json_lists_on_one_line_stay_on_one_line(home: Path) -> None:
    file = home / FILES["opencode"]
    file.parent.mkdir(parents=True)
    lines = ['    "list": ["a", "b", {"c": 1}],', '    "short":[1,2],', '    "none": [],']
    long = ['    "long": [', '        "a"', "    ]"]
    file.write_text("\n".join(["{", *lines, *long, "}", ""]))
    assert main(["connect", "opencode", "--write"]) == 0
    written = file.read_text().splitlines()
    assert written[:4] == ["{", lines[0], '    "short": [1,2],', lines[2]]
    assert written[4:7] == [*long[:2], "    ],"]
    file.write_text('{"plugin": ["a", "b"]}')
    assert main(["connect", "opencode", "--write"]) == 0
    assert file.read_text().startswith('{\n  "plugin": ["a", "b"],\n  "$schema"')


def test_without_global_claudes_own_settings_stay_unchanged(home: Path) -> None:
    (home / ".claude").mkdir()
    (home / GLOBAL).write_text(SETTINGS)
    assert connect("claude", "--write") == 0
    assert (home / GLOBAL).read_text() == SETTINGS


def test_global_is_refused_for_other_clients(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert connect("codex", "--global", "--write") == 1
    assert "--global is for claude" in capsys.readouterr().err and not contents(home)


@pytest.mark.parametrize("client", [*FILES, "claude --global"])
@pytest.mark.parametrize("original", [None, b"", b'{\r\n\t"mine": {"deep": [1, 2.50]}\r\n}'])
@pytest.mark.usefixtures("serving")
def test_undo_restores_files_and_folders(client: str, original: bytes | None, home: Path) -> None:
    """Byte for byte, also after several calls of --write."""
    name, *flags = client.split()
    file = home / (GLOBAL if flags else FILES[name])
    if original and file.suffix == ".toml":
        original = b"[mine]\r\ndeep = [1, 2.50]"
    if original is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(original)
        file.chmod(0o640)
    before = modes_and_bytes(home)
    assert connect(name, "--write", *flags) == 0
    assert connect(name, "--write", *flags, "--port", "8124") == 0
    assert modes_and_bytes(home).keys() > before.keys() and file.read_bytes() != original
    assert connect(name, "--undo") == 0
    assert modes_and_bytes(home) == before
    assert connect(name, "--undo") == 0


def test_undo_keeps_folders_with_other_files(home: Path) -> None:
    """Empty folders that existed before are kept, too."""
    (home / ".config").mkdir()
    for client in ("codex", "opencode"):
        assert connect(client, "--write") == 0
    (home / ".codex" / "auth.json").write_text("{}")
    for client in ("codex", "opencode"):
        assert connect(client, "--undo") == 0
    assert set(modes_and_bytes(home)) == {".config", ".codex", ".codex/auth.json"}


def test_write_and_undo_exclude_each_other(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        connect("claude", "--write", "--undo")
    assert "not allowed with argument --write" in capsys.readouterr().err and not contents(home)


@pytest.mark.parametrize("is_written_again", [False, True])
def test_undo_keeps_later_changes_of_the_user(is_written_again: bool, home: Path) -> None:
    file = home / GLOBAL
    file.parent.mkdir()
    file.write_text(SETTINGS)
    assert connect_claude_globally() == 0
    settings = read(file)
    settings["env"]["ANTHROPIC_MODEL"] = "opus"
    if not is_written_again:  # a second --write would replace this value
        settings["env"]["ANTHROPIC_BASE_URL"] = "https://mine.example"
    file.write_text(json.dumps({**settings, "theme": "dark"}))
    if is_written_again:
        assert connect_claude_globally("--port", "8124") == 0
    assert connect("claude", "--undo") == 0
    expected = json.loads(SETTINGS)
    expected["env"]["ANTHROPIC_MODEL"] = "opus"
    if not is_written_again:
        expected["env"]["ANTHROPIC_BASE_URL"] = "https://mine.example"
    assert read(file) == {**expected, "theme": "dark"}
    assert contents(home).keys() == {GLOBAL}


def test_undo_keeps_later_changes_in_a_file_that_was_blank(home: Path) -> None:
    file = home / GLOBAL
    file.parent.mkdir()
    file.write_text("\n")
    assert connect_claude_globally() == 0
    file.write_text(json.dumps({**read(file), "theme": "dark"}))
    assert connect("claude", "--undo") == 0
    assert read(file) == {"theme": "dark"}


def test_undo_restores_settings_that_a_program_reformatted(home: Path) -> None:
    file = home / GLOBAL
    file.parent.mkdir()
    file.write_text(SETTINGS)
    before = modes_and_bytes(home)
    assert connect_claude_globally() == 0
    file.write_text(json.dumps(read(file), separators=(",", ":")))
    assert connect("claude", "--undo") == 0
    assert modes_and_bytes(home) == before


def test_write_and_undo_keep_crlf_line_ends(home: Path) -> None:
    file = home / GLOBAL
    file.parent.mkdir()
    file.write_bytes(b'{\r\n\t"theme": "dark"\r\n}')
    assert connect_claude_globally() == 0
    written = file.read_bytes()
    assert written.count(b"\n") == written.count(b"\r\n") > 2 and written.endswith(b"}")
    file.write_bytes(written.replace(b'"dark"', b'"light"'))
    assert connect("claude", "--undo") == 0
    assert file.read_bytes() == b'{\r\n\t"theme": "light"\r\n}'


PROFILE = """# mine
model_reasoning_effort = "high"
model = "gpt-5"  # why
notify = [
  "model",
]

[model_providers.mine]
name = "mine"
"""


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("original", [None, "", PROFILE, PROFILE.removesuffix("\n")])
@pytest.mark.parametrize("is_written_again", [False, True])
def test_undo_keeps_entries_that_codex_added_to_its_profile(
    is_written_again: bool, original: str | None, line_end: str, home: Path
) -> None:
    """Codex saves the hints that it has shown, and the effort that the user chose."""
    file = home / FILES["codex"]
    if original is not None:
        file.parent.mkdir()
        file.write_bytes(original.replace("\n", line_end).encode())
    assert connect("codex", "--write") == 0
    connected = file.read_bytes().decode().replace("\r\n", "\n")
    effort, hints = 'model_verbosity = "low"\n', "[tui]\nhints = true\n"
    head, table, provider = connected.partition("[model_providers.kvpersist]\n")
    assert table and 'model = "default_model"\n' in head
    changed = f"{head}{effort}{table}{provider}retries = 3\n{hints}"
    if original and not original.endswith("\n"):
        changed = f"{head}{effort}{table}{provider}\nretries = 3\n{hints}"
    file.write_bytes(changed.replace("\n", line_end).encode())
    if is_written_again:
        assert connect("codex", "--write", "--port", "8124") == 0
        written = file.read_bytes().decode()
        assert "8124" in written and "8123" not in written and "hints = true" in written
    assert connect("codex", "--undo") == 0
    expected = f"{effort}{table}retries = 3\n{hints}"
    if original:
        expected = f"{PROFILE}{expected}"
    assert file.read_bytes().decode().replace("\r\n", "\n") == expected
    assert set(contents(home)) == {FILES["codex"]}


def test_undo_of_a_new_profile_leaves_only_codex_entries(home: Path) -> None:
    """Codex writes this entry when its screen starts."""
    file = home / FILES["codex"]
    assert connect("codex", "--write") == 0
    with file.open("a") as profile:
        profile.write("\n[tui]\nhints = true\n")
    assert connect("codex", "--undo") == 0
    assert contents(home) == {FILES["codex"]: b"[tui]\nhints = true\n"}


@pytest.mark.usefixtures("serving")
def test_a_file_that_undo_cannot_restore_is_kept(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other files of the client are restored."""
    file, facts = home / FILES["aider"], home / ".aider.kvpersist.models.json"
    for path in (file, facts):
        path.write_text(SETTINGS)
    assert connect("aider", "--write") == 0
    file.write_text(mine := file.read_text() + "// mine\n")
    assert connect("aider", "--undo") == 1
    error = capsys.readouterr().err
    assert f"{file} cannot be restored (" in error
    record = home / "..aider.kvpersist.json.kvpersist-undo"
    assert error.endswith(f"its former content is in {record}\n")
    assert file.read_text() == mine and json.loads(record.read_text())["before"] == SETTINGS
    assert facts.read_text() == SETTINGS
    file.write_text(mine.removesuffix("// mine\n"))
    assert connect("aider", "--undo") == 0
    assert contents(home).keys() == {FILES["aider"], facts.name}


@pytest.mark.parametrize(
    ("client", "original", "problem"),
    [
        ("opencode", '{\n  // mine\n  "theme": "dark"\n}\n', "Expecting property name"),
        ("claude", '{"env": ["A=b"]}', "where keys and values were expected"),
        ("claude", "[]", "where keys and values were expected"),
        ("claude", json.dumps(["a" * 50]), f'found ["{"a" * 37}… where keys'),
        ("claude", '{"a": 1e400}', "not JSON compliant"),
        ("claude", '{"b": {"a": 1, "a": 2}}', 'a key exists twice in "a", "a"'),
        ("claude", '{"a": Infinity}', "not JSON compliant"),
        ("claude", '{"a": "\\ud800"}', "surrogates not allowed"),
        ("claude", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "recursion"),
    ],
)
def test_json_that_cannot_be_merged_stays_unchanged(
    client: str, original: str, problem: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = home / (GLOBAL if client == "claude" else FILES[client])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(original)
    assert connect(client, "--write", *["--global"][: client == "claude"]) == 1
    out, err = capsys.readouterr()
    assert problem in err and err.count("\n") == 1
    assert file.read_text() == original and len(contents(home)) == 1
    assert URL in out and "by hand" in err


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 cannot read TOML")
@pytest.mark.parametrize(
    "original",
    [
        'model = "x"\nmodel = "y"\n',
        '\ufeffmodel = "x"\n',
        '"model" = "x"\n',
        '  [model_providers.kvpersist]\n  name = "x"\n',
        '[ model_providers.kvpersist ]\nname = "x"\n',
        'model_providers = {kvpersist = {name = "x"}}\n',
        'model_providers.kvpersist.name = "x"\n',
        'notes = """\nmodel = 3\n"""\n',
    ],
)
def test_toml_that_cannot_be_merged_stays_unchanged(
    original: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = home / FILES["codex"]
    file.parent.mkdir()
    file.write_text(original)
    assert connect("codex", "--write") == 1
    out, err = capsys.readouterr()
    assert file.read_text() == original and len(contents(home)) == 1
    assert URL in out and "by hand" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "original",
    [
        'notes = """\n[Rules]\nBe kind.\n"""\n',
        "pairs = [\n[1, 2],\n[3, 4]\n]\n",
        '[model_providers.kvpersist]\nnotes = """\n[x]\n"""\n',
    ],
)
def test_multiline_toml_values_stay_unchanged(original: str, home: Path) -> None:
    """New entries are put before them, because their lines may look like tables."""
    file = home / FILES["codex"]
    file.parent.mkdir()
    file.write_text(original)
    assert connect("codex", "--write") == 0
    assert original.removeprefix("[model_providers.kvpersist]\n") in file.read_text()
    assert connect("codex", "--undo") == 0
    assert file.read_text() == original


@pytest.mark.parametrize("port", ["0", "-1", "65536"])
def test_an_invalid_port_is_refused_and_not_written(
    port: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["connect", "claude", "--write", "--port", port]) == 1
    assert f"--port {port} is not a port" in capsys.readouterr().err and not list(home.iterdir())


def test_a_named_pipe_as_settings_file_is_refused(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = home / FILES["claude"]
    file.parent.mkdir()
    os.mkfifo(file)
    assert connect("claude", "--write") == 1
    assert "it is not a regular file" in capsys.readouterr().err


def test_refusal_of_json_with_comments_states_the_reason(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = home / FILES["opencode"]
    file.parent.mkdir(parents=True)
    file.write_text(text := '{// mine\n"model": "x"}')
    assert connect("opencode", "--write") == 1
    assert "perhaps it has comments" in capsys.readouterr().err and file.read_text() == text


def test_undo_prints_the_file_that_it_removes(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert connect("opencode", "--write") == connect("opencode", "--undo") == 0
    assert f"{home / FILES['opencode']} is removed." in capsys.readouterr().out


def test_circular_symbolic_links_are_refused(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = home / FILES["claude"]
    file.parent.mkdir()
    file.symlink_to("other.json")
    (file.parent / "other.json").symlink_to(file.name)
    assert connect("claude", "--write") == 1
    assert "stays unchanged" in (err := capsys.readouterr().err) and err.count("\n") == 1
    assert connect("claude", "--undo") == 0
    assert "has written no file" in capsys.readouterr().out and file.is_symlink()


def test_undo_record_is_private_and_settings_keep_their_mode(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    file = home / GLOBAL
    file.parent.mkdir()
    file.write_text(SETTINGS)
    monkeypatch.setattr("os.fsync", lambda file: synced.append(os.fstat(file).st_mode & 0o777))
    file.chmod(0o644)
    assert connect_claude_globally() == 0
    assert synced == [0o600, 0o644], "both files, whole before they have their names"


def test_open_webui_gets_environment_variables(capsys: pytest.CaptureFixture[str]) -> None:
    """Open WebUI has no settings file; --write is accepted and writes nothing."""
    for options in ((), ("--write",)):
        assert connect("openwebui", *options) == 0
        out, err = capsys.readouterr()
        assert f"OPENAI_API_BASE_URL={URL}/v1" in out and err == ""


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose model takes 32,768 tokens."""

    def ask(url: str, path: str) -> Any:
        assert path == "/v1/models"
        return {"data": [{"id": "m"}, {"id": "claude-m", "max_model_len": 32768}]}

    monkeypatch.setattr("mlx_lm_kvpersist.cli.connect.ask", ask)


@pytest.mark.usefixtures("serving")
def test_each_client_gets_the_models_context_length(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for client in FILES:
        assert connect(client, "--write") == 0
    assert "context" not in capsys.readouterr().err
    assert read(home / FILES["claude"])["env"]["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "32768"
    provider = read(home / FILES["opencode"])["provider"]["kvpersist"]
    limit = provider["models"]["default_model"]["limit"]
    assert limit["context"] == 32768 and 0 < limit["output"] < 32768
    facts = read(home / FILES["aider"])["model-metadata-file"]
    assert read(Path(facts))["openai/default_model"]["max_input_tokens"] == 32768
    if sys.version_info >= (3, 11):
        assert read(home / FILES["codex"])["model_context_window"] == 32768


@pytest.mark.parametrize("model", [{"max_model_len": None}, {"max_model_len": "long"}, 1])
def test_a_server_without_a_context_length_is_accepted(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mlx_lm_kvpersist.cli.connect.ask", lambda *_: {"data": [model]})
    assert connect("claude") == 0
    assert f"The server at {URL} states no context length" in capsys.readouterr().out


def test_connect_reports_that_no_server_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert connect("claude") == 0
    out = capsys.readouterr().out
    assert f"No server answers at {URL}" in out and "COMPACT" not in out
    assert f"--plugin kvpersist --port {urlsplit(URL).port} --model" in out


def test_settings_folders_follow_environment_variables(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(home / "c"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "x"))
    assert connect("claude", "--write") == connect("opencode", "--write") == 0
    assert (home / "c" / "kvpersist.json").exists()
    assert (home / "x" / "opencode" / "opencode.json").exists()
