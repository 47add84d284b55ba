"""`mlx-lm-kvpersist connect`: a client's configuration for this server, printed or written.

A file that exists is merged: what else it says stays, comments included. The merged text is parsed
again; if anything but our own keys changed, nothing is written.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError
from ..store.folder import whole_file

Settings = Mapping[str, Any]

_NAME = "kvpersist"
_TITLE = "mlx-lm-kvpersist"
_MODEL = "default_model"
"""What the stock server calls the model of `--model`."""
_CLAUDE_MODEL = "claude-local"
"""Every name that begins so is the server's own model, and Claude Code lists no other."""
_NO_KEY = "none"


@dataclass(frozen=True)
class FileFormat:
    """How a file is read, and how settings are merged into its text; both raise ValueError."""

    parse: Callable[[str], Any]
    merge: Callable[[str, Settings], str]


@dataclass(frozen=True)
class Client:
    """What a client needs: `settings` for its `file`, if it has one, and how it is then started.

    `without_file` starts it with nothing written.
    """

    without_file: str
    start: str = ""
    file: Path | None = None
    format: FileFormat | None = None
    settings: Settings | None = None


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit status. Raises ConfigError where nothing can be written."""
    client = CLIENTS[args.client](f"http://127.0.0.1:{args.port}")
    if client.file is None or client.format is None or client.settings is None:
        if args.write:
            raise ConfigError(
                f"{args.client} has no configuration file; start it with: {client.without_file}"
            )
        print(f"Start it:\n\n  {client.without_file}")
        return 0
    ours = client.format.merge("", client.settings)
    if args.write:
        try:
            _write(client.file, client.format, client.settings)
        except (ValueError, OSError) as error:
            print(f"What to add to {client.file}:\n\n{ours}")
            why = " ".join(str(error).split())
            raise ConfigError(
                f"{client.file} is left as it is ({why}); add the lines above by hand"
            ) from error
    else:
        print(f"What --write adds to {client.file}:\n\n{ours}")
    print(f"Start it:\n\n  {client.start}")
    if not args.write:
        print(f"\nOr without the file:\n\n  {client.without_file}")
    return 0


def _write(file: Path, form: FileFormat, settings: Settings) -> None:
    """Merge settings into a file, show the difference, and keep what was there beside it.

    Raises ValueError where it cannot be merged, OSError where it cannot be read or written.
    """
    path = file.resolve()  # a link stays one
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    there = form.parse(before) if before.strip() else {}
    wanted = _merged(there, settings)
    if there == wanted:
        print(f"{file} says all of it already.\n")
        return
    after = form.merge(before, settings)
    if before.strip() and form.parse(after) != wanted:
        raise ValueError("its lines cannot be merged")
    old, new = before.splitlines(), after.splitlines()
    print("\n".join(difflib.unified_diff(old, new, str(file), str(file), lineterm="")))
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = None
    kept = ""
    if path.exists():
        mode = path.stat().st_mode & 0o777
        backup = next(p for n in count(1) if not (p := Path(f"{path}.bak{n}")).exists())
        shutil.copy2(path, backup)
        kept = f"; what was there is in {backup}"
    with whole_file(path, fsync=True) as out:
        out.write(after.encode())
    if mode is not None:
        path.chmod(mode)
    print(f"\n{file} is written{kept}.\n")


def _merged(there: Any, settings: Settings) -> dict[str, Any]:
    """Return what is there with the settings in it. Raises ValueError where it is not a table."""
    if not isinstance(there, dict):
        raise ValueError(f"found {json.dumps(there)[:40]} where keys and values were expected")
    merged = dict(there)
    for key, value in settings.items():
        merged[key] = _merged(there.get(key, {}), value) if isinstance(value, Mapping) else value
    return merged


def _merge_json(text: str, settings: Settings) -> str:
    indent = re.search(r"^([ \t]+)\S", text, re.MULTILINE)
    merged = _merged(json.loads(text) if text.strip() else {}, settings)
    return json.dumps(merged, indent=indent[1] if indent else 2, ensure_ascii=False) + "\n"


def _merge_lines(text: str, lines: list[str]) -> str:
    """Put lines `key: value` or `key = value` in the place of those with their keys, or last.

    A comment behind a value stays.
    """
    added = []
    for line in lines:
        key = re.match(r"[\w-]+(?=\s*[:=])", line)
        found = key and re.search(rf"^{key[0]}\s*[:=][^#\n]*(#.*)?$", text, re.MULTILINE)
        if found:
            comment = f"  {found[1]}" if found[1] else ""
            text = text[: found.start()] + line + comment + text[found.end() :]
        elif line not in text.splitlines():
            added.append(line)
    if added and text and not text.endswith("\n"):
        text += "\n"
    return text + "".join(f"{line}\n" for line in added)


def _merge_yaml(text: str, settings: Settings) -> str:
    return _merge_lines(text, [f"{key}: {value}" for key, value in settings.items()])


def _merge_toml(text: str, settings: Settings) -> str:
    lines = [f"{key} = {json.dumps(v)}" for key, v in settings.items() if isinstance(v, str)]
    for table, entries in _tables(settings):
        lines += [f"[{table}]", *(f"{key} = {json.dumps(v)}" for key, v in entries.items())]
    return _merge_lines(text, lines)


def _tables(settings: Settings) -> list[tuple[str, Settings]]:
    """Return the tables that stand two deep, as a provider's does, by their names."""
    groups = ((name, group) for name, group in settings.items() if isinstance(group, Mapping))
    return [(f"{name}.{key}", table) for name, group in groups for key, table in group.items()]


def _parse_yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"it is no YAML: {error}") from error


def _parse_toml(text: str) -> Any:
    if sys.version_info < (3, 11):
        raise ValueError("Python 3.10 cannot read TOML")
    import tomllib

    return tomllib.loads(text)


JSON = FileFormat(json.loads, _merge_json)
YAML = FileFormat(_parse_yaml, _merge_yaml)
TOML = FileFormat(_parse_toml, _merge_toml)


def _folder(variable: str, *otherwise: str) -> Path:
    """Return the folder that a variable names, else one below the user's own."""
    return Path(os.environ.get(variable) or Path.home().joinpath(*otherwise))


def _with(variables: Mapping[str, str], command: str) -> str:
    """Return a shell's command with variables set before it."""
    return " ".join([*(f"{name}={shlex.quote(v)}" for name, v in variables.items()), command])


def claude(url: str) -> Client:
    """Claude Code reads `env` of its settings, and a variable of the shell otherwise."""
    variables = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": _NO_KEY,
        "ANTHROPIC_MODEL": _CLAUDE_MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": _CLAUDE_MODEL,
    }
    file = _folder("CLAUDE_CONFIG_DIR", ".claude") / "settings.json"
    return Client(_with(variables, "claude"), "claude", file, JSON, {"env": variables})


def codex(url: str) -> Client:
    """Codex lays a profile's file over its own configuration, since 0.162."""
    provider = {"name": _TITLE, "base_url": f"{url}/v1", "wire_api": "responses"}
    table = ", ".join(f"{key}={json.dumps(value)}" for key, value in provider.items())
    options = [f"model={_MODEL}", f"model_provider={_NAME}"]
    options.append(f"model_providers.{_NAME}={{{table}}}")
    file = _folder("CODEX_HOME", ".codex") / f"{_NAME}.config.toml"
    settings = {"model": _MODEL, "model_provider": _NAME, "model_providers": {_NAME: provider}}
    command = " ".join(["codex", *(f"-c {shlex.quote(option)}" for option in options)])
    return Client(command, f"codex --profile {_NAME}", file, TOML, settings)


def opencode(url: str) -> Client:
    """Opencode takes a provider of any name, and models only by their ids."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": _TITLE,
        "options": {"baseURL": f"{url}/v1"},
        "models": {_MODEL: {"name": "the server's model"}},
    }
    settings = {"$schema": "https://opencode.ai/config.json", "provider": {_NAME: provider}}
    start = f"opencode --model {_NAME}/{_MODEL}"
    file = _folder("XDG_CONFIG_HOME", ".config") / "opencode" / "opencode.json"
    content = {"OPENCODE_CONFIG_CONTENT": json.dumps(settings)}
    return Client(_with(content, start), start, file, JSON, settings)


def aider(url: str) -> Client:
    """Aider reads the same from variables and from its file; `openai/` names the API."""
    model = f"openai/{_MODEL}"
    variables = {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": _NO_KEY}
    settings = {"openai-api-base": f"{url}/v1", "openai-api-key": _NO_KEY, "model": model}
    file = Path.home() / ".aider.conf.yml"
    return Client(_with(variables, f"aider --model {model}"), "aider", file, YAML, settings)


def openwebui(url: str) -> Client:
    """Open WebUI reads variables at its first start; with the last it names each chat."""
    variables = {
        "OPENAI_API_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": _NO_KEY,
        "ENABLE_FORWARD_USER_INFO_HEADERS": "true",
    }
    return Client(_with(variables, "open-webui serve --port 3000"))


CLIENTS: dict[str, Callable[[str], Client]] = {
    function.__name__: function for function in (claude, codex, opencode, aider, openwebui)
}
