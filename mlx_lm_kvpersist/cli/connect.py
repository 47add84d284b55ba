"""`mlx-lm-kvpersist connect`: a client's configuration for this server, printed or written.

Other settings in a file stay. Before a file is written, its content is saved next to it for
`--undo`.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import ConfigError, KVPersistError
from ..store.folder import whole_file
from ..units import shortened
from .servers import ask

Settings = Mapping[str, Any] | str
"""The settings to add to a file: a mapping for JSON, a text for TOML."""

_NAME = "kvpersist"
_TITLE = "mlx-lm-kvpersist"
_MODEL = "default_model"
"""The stock server's name for the model of `--model`."""
_CLAUDE_MODEL = "claude-local"
"""Claude Code lists only names that begin with "claude"; the server answers to them."""
_NO_KEY = "none"
_MAX_OUTPUT = 32_000


@dataclass(frozen=True)
class Client:
    """A client's configuration `files` (JSON or TOML), and the command `start` that uses them.

    without_file: a command with the same effect as the files. for_all: files for --global, which
        change the client for all projects; `start` is then not needed.
    """

    start: str
    files: Mapping[Path, Settings]
    without_file: str = ""
    for_all: Mapping[Path, Settings] = field(default_factory=dict)


def run(args: argparse.Namespace) -> int:
    if not 0 < args.port < 1 << 16:
        raise ConfigError(f"--port {args.port} is not a port; give the server's port, such as 8080")
    url = f"http://127.0.0.1:{args.port}"
    if args.client == ROUTER:
        print(f"Start it:\n\n  {router(args.server or [url])}")
        return 0
    if args.server:
        raise ConfigError("--server names the servers of a router; other clients have --port")
    if args.undo:
        undo(args.client)
        return 0
    client = CLIENTS[args.client](url, context_of(url))
    if args.for_all and not client.for_all:
        raise ConfigError(
            f"--global is for claude; connect {args.client} changes nothing outside of the files "
            "that it shows"
        )
    files, start = client.files, client.start
    if args.for_all:
        files, start = client.for_all, args.client
        print(f"With --global every project of {args.client} uses this server.\n")
    for file, settings in files.items():
        ours = _text(settings, "")
        if not args.write:
            print(f"What --write adds to {file}:\n\n{ours}")
            continue
        try:
            _write(file, settings)
        except (ValueError, OSError, RuntimeError) as error:
            # RuntimeError: a cycle of links, or deeply nested JSON.
            print(f"What to add to {file}:\n\n{ours}")
            left = f"{file} stays unchanged ({' '.join(str(error).split())})"
            raise ConfigError(f"{left}; add the lines above by hand") from error
    print(f"Start it:\n\n  {start}")
    if client.without_file and not args.write:
        print(f"\nOr without the file:\n\n  {client.without_file}")
    if args.write and files:
        print(f"\nTo go back:\n\n  mlx-lm-kvpersist connect {args.client} --undo")
    return 0


def context_of(url: str) -> int | None:
    """Return a running server's context length in tokens; if it is unknown, print why."""
    try:
        models = ask(url, "/v1/models")["data"]
        return next(int(entry["max_model_len"]) for entry in models if "max_model_len" in entry)
    except KVPersistError:
        print(
            f"No server answers at {url}. Start it with `mlx_lm.server --plugin kvpersist "
            f"--port {urlsplit(url).port or 80} --model ...`, and connect again: the client then "
            "knows the model's context length.\n"
        )
    except (KeyError, TypeError, ValueError, StopIteration):  # e.g. a server without the plugin
        print(f"The server at {url} states no context length, so the client does not know it.\n")
    return None


def undo(name: str) -> None:
    """Undo the changes of `--write` to the files of a client. Raises ConfigError if it fails."""
    client = CLIENTS[name]("", 1)
    failures, n_records = [], 0
    for file in (*client.files, *client.for_all):
        path = Path(os.path.realpath(file))  # Path.resolve raises an error for a cycle of links
        if not (record := _record_of(path)).exists():
            continue
        n_records += 1
        try:
            written = json.loads(record.read_bytes())
            former = _undone(path, written)
            if former is None:
                path.unlink(missing_ok=True)
            else:
                _replace(path, former, path.stat().st_mode & 0o777)
        except (ValueError, LookupError, TypeError, OSError, RecursionError) as error:
            why = " ".join(str(error).split())
            failures.append(f"{file} cannot be restored ({why}); its former content is in {record}")
            continue
        record.unlink()
        for folder in written.get("folders", ()):
            with suppress(OSError):  # the folder has other files, or is missing
                Path(folder).rmdir()
        kept = "" if former == written["before"] else ", except for later changes"
        print(f"{file} is {'removed' if former is None else 'as it was'}{kept}.")
    if not n_records:
        print(f"connect has written no file of {name}'s.")
    if failures:
        raise ConfigError("; ".join(failures))


def _undone(path: Path, record: Mapping[str, Any]) -> str | None:
    """Return the content of a file without the change that `connect` made.

    Later changes by other programs stay. Returns None if the file did not exist before. Raises
    ValueError if the former content is not known.
    """
    before: str | None = record["before"]
    after: str = record["after"]
    current = _content(path)
    if current in (after, before):
        return before
    if current is None:
        raise ValueError("somebody has removed it")
    if path.suffix == ".toml":
        old, new = _tables(before or ""), _tables(after)
        table = _without(_tables(current), old, new)
        for header in new.keys() - old.keys():
            if not any(map(str.strip, table.get(header, {}).values())):
                table.pop(header, None)
        text = _in_toml(table, current)
        return text if before is not None else text.lstrip() or None
    former = json.loads((before or "").strip() or "{}")
    table = _without(json.loads(current, object_pairs_hook=_table), former, json.loads(after))
    # If only the style of the file differs, restore the former text.
    return before if json.dumps(table) == json.dumps(former) else _in_json(table, current)


def _without(
    current: Mapping[Any, Any], before: Mapping[Any, Any], after: Mapping[Any, Any]
) -> dict[Any, Any]:
    """Return the current table without the change from `before` to `after`."""
    table = dict(current)
    for key, value in after.items():
        if isinstance(value, dict) and isinstance(table.get(key), dict):
            table[key] = _without(table[key], before.get(key, {}), value)
            is_ours = not table[key] and key not in before
        elif is_ours := key in table and table[key] == value:
            table[key] = before.get(key)
        if is_ours and key not in before:
            del table[key]
    return table


def _content(path: Path) -> str | None:
    """Return a file's text, or None if it does not exist. Raises ValueError if not UTF-8."""
    return path.read_bytes().decode() if path.exists() else None


def _record_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.{_NAME}-undo")


def _write(file: Path, settings: Settings) -> None:
    """Merge settings into a file and show the difference; first save the former content.

    Raises ValueError if settings cannot be merged, OSError or RuntimeError for an unusable file.
    """
    path = file.resolve()  # keep a link: write to its target
    if path.exists() and not path.is_file():
        raise ValueError("it is not a regular file")
    before = _content(path)
    after = _text(settings, before or "")
    after.encode()  # raises ValueError before anything is written
    if before == after:
        print(f"{file} already has all settings.\n")
        return
    old, new = (before or "").splitlines(), after.splitlines()
    print("\n".join(difflib.unified_diff(old, new, str(file), str(file), lineterm="")))
    folders = [str(folder) for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = 0o600 if before is None else path.stat().st_mode & 0o777
    record = _record_of(path)
    if record.exists():  # from an earlier `connect`
        with suppress(ValueError):  # the settings file was removed
            written = json.loads(record.read_bytes())
            folders = written.get("folders", [])
            before = _undone(path, written)
    _replace(record, json.dumps({"before": before, "after": after, "folders": folders}), 0o600)
    _replace(path, after, mode)
    print(f"\n{file} is written.\n")


def _replace(path: Path, text: str, mode: int) -> None:
    with whole_file(path, fsync=True) as out:
        os.fchmod(out.fileno(), mode)
        out.write(text.encode())


def _text(settings: Settings, before: str) -> str:
    """Return a file's text with the settings added. Raises ValueError if it cannot be merged."""
    if isinstance(settings, str):
        tables = _tables(before)
        for header, lines in _tables(settings).items():
            old = tables.get(header, {})
            new = {key: line for key, line in lines.items() if key not in old}
            tables[header] = new | old | lines  # new keys first: `old` may end inside a value
        text = _in_toml(tables, before)
        if sys.version_info >= (3, 11):  # Python 3.10 cannot read TOML
            import tomllib

            # `_tables` misreads quoted or dotted keys, inline tables, and strings of several lines.
            if tomllib.loads(text) != _merged(tomllib.loads(before), tomllib.loads(settings)):
                raise ValueError("its entries have another form than expected")
        return text
    try:
        current = json.loads(before, object_pairs_hook=_table) if before.strip() else {}
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not plain JSON, perhaps it has comments: {error}") from error
    merged = _merged(current, settings)
    return before if merged == current else _in_json(merged, before)


def _in_json(table: Mapping[str, Any], like: str) -> str:
    """Return a table as JSON, in the style of `like`."""
    indented = re.search(r"^([ \t]+)\S", like, re.MULTILINE)
    text = _expanded(table, like, "\n", indented[1] if indented else "  ")
    return _with_line_ends(f"{text}\n", like)


def _expanded(value: Any, like: str, line: str, indent: str) -> str:
    """Return a value as JSON of several lines. Lists and objects on one line in `like` stay so.

    line: a line break and the indentation of the value.
    """
    for separators in ((", ", ": "), (",", ":"), (",", ": ")):
        text = json.dumps(value, separators=separators, ensure_ascii=False, allow_nan=False)
        if not value or not isinstance(value, dict | list) or text in like:
            return text
    inner = line + indent
    named = [("", each) for each in value]
    if isinstance(value, dict):
        named = [(f"{json.dumps(k, ensure_ascii=False)}: ", each) for k, each in value.items()]
    parts = [name + _expanded(each, like, inner, indent) for name, each in named]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}{inner}{f',{inner}'.join(parts)}{line}{closing}"


def _tables(toml: str) -> dict[tuple[str, int], dict[tuple[str, int], str]]:
    """Return a TOML text as {(header, number): {(key, number): line}}.

    Lines before the first table have the header "". The number counts equal headers or keys, such
    as the keys "" of blank lines.
    """
    lines: dict[tuple[str, int], str] = {}
    tables = {("", 0): lines}
    for line in toml.replace("\r\n", "\n").removesuffix("\n").split("\n") if toml else ():
        if re.fullmatch(r"\[.*\]\s*(#.*)?", line):
            lines = tables[_numbered(line, tables)] = {}
        else:
            lines[_numbered(line.partition("=")[0].strip(), lines)] = line
    return tables


def _numbered(name: str, known: Collection[tuple[str, int]]) -> tuple[str, int]:
    return next((name, n) for n in count() if (name, n) not in known)


def _in_toml(tables: Mapping[tuple[str, int], Mapping[Any, str]], like: str) -> str:
    lines = [line for (header, _), table in tables.items() for line in (header, *table.values())]
    return _with_line_ends("".join(f"{line}\n" for line in lines[1:]), like)


def _with_line_ends(text: str, like: str) -> str:
    if like.strip() and not like.endswith("\n"):
        text = text.removesuffix("\n")
    return text.replace("\n", "\r\n") if "\r\n" in like else text


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's entries. Raises ValueError if a key exists twice."""
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = ", ".join(json.dumps(key) for key, _ in pairs)
        raise ValueError(f"a key exists twice in {keys}")
    return table


def _merged(current: Any, settings: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the current table with the settings added. Raises ValueError if it is not a table."""
    if not isinstance(current, dict):
        raise ValueError(
            f"found {shortened(json.dumps(current), 40)} where keys and values were expected"
        )
    merged = dict(current)
    for key, value in settings.items():
        merged[key] = _merged(current.get(key, {}), value) if isinstance(value, Mapping) else value
    return merged


def _folder(variable: str, *otherwise: str) -> Path:
    return Path(os.environ.get(variable) or Path.home().joinpath(*otherwise))


def _with(variables: Mapping[str, str], command: str) -> str:
    return " ".join([*(f"{name}={shlex.quote(v)}" for name, v in variables.items()), command])


def claude(url: str, n_context: int | None) -> Client:
    """Claude Code reads `env` of a settings file, otherwise the shell's variables."""
    variables = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": _NO_KEY,
        "ANTHROPIC_MODEL": _CLAUDE_MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": _CLAUDE_MODEL,
    }
    if n_context:
        variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(n_context)
    folder, settings = _folder("CLAUDE_CONFIG_DIR", ".claude"), {"env": variables}
    file = folder / f"{_NAME}.json"
    start = f"claude --settings {shlex.quote(str(file))}"
    in_shell = _with(variables, "claude")
    return Client(start, {file: settings}, in_shell, {folder / "settings.json": settings})


def codex(url: str, n_context: int | None) -> Client:
    """Since Codex 0.162, a profile's file overrides the other configuration."""
    window = f"model_context_window = {n_context}\n" if n_context else ""
    settings = (
        f'model = "{_MODEL}"\nmodel_provider = "{_NAME}"\n{window}'
        f'[model_providers.{_NAME}]\nname = "{_TITLE}"\nbase_url = "{url}/v1"\n'
        'wire_api = "responses"\n'
    )
    file = _folder("CODEX_HOME", ".codex") / f"{_NAME}.config.toml"
    return Client(f"codex --profile {_NAME}", {file: settings})


def opencode(url: str, n_context: int | None) -> Client:
    """Opencode accepts any name of a provider, and finds models by their ids."""
    model: dict[str, Any] = {"name": "the server's model"}
    if n_context:
        model["limit"] = {"context": n_context, "output": min(n_context // 4, _MAX_OUTPUT)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": _TITLE,
        "options": {"baseURL": f"{url}/v1"},
        "models": {_MODEL: model},
    }
    settings = {"$schema": "https://opencode.ai/config.json", "provider": {_NAME: provider}}
    file = _folder("XDG_CONFIG_HOME", ".config") / "opencode" / "opencode.json"
    return Client(f"opencode --model {_NAME}/{_MODEL}", {file: settings})


def aider(url: str, n_context: int | None) -> Client:
    """Aider reads options from YAML (JSON is valid YAML), and facts about models from JSON."""
    model, folder = f"openai/{_MODEL}", Path.home()
    settings = {"openai-api-base": f"{url}/v1", "openai-api-key": _NO_KEY, "model": model}
    file, facts = folder / f".aider.{_NAME}.json", folder / f".aider.{_NAME}.models.json"
    files: dict[Path, Settings] = {file: settings}
    if n_context:
        settings["model-metadata-file"] = str(facts)
        limits = {"max_input_tokens": n_context, "litellm_provider": "openai", "mode": "chat"}
        files[facts] = {model: limits}
    return Client(f"aider --config {shlex.quote(str(file))}", files)


def openwebui(url: str, n_context: int | None) -> Client:
    """Open WebUI reads variables at its first start. The last one makes it send chat ids."""
    variables = {
        "OPENAI_API_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": _NO_KEY,
        "ENABLE_FORWARD_USER_INFO_HEADERS": "true",
    }
    return Client(_with(variables, "open-webui serve --port 3000"), {})


def router(servers: Sequence[str]) -> str:
    """Return the command of SGLang's model gateway in front of running servers.

    The gateway uses the first model name that the servers list. Raises ConfigError if the servers
    list different names, KVPersistError if a server does not answer.
    """
    urls = [url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}" for url in servers]
    names: dict[str, str] = {}
    for url in urls:
        try:
            names[url] = ask(url, "/v1/models")["data"][0]["id"]
        except (LookupError, TypeError) as error:
            raise ConfigError(f"{url} lists no model; start its server with --model") from error
    (model, *other_models) = set(names.values())
    if other_models:
        listed = "; ".join(f"{url} has {name}" for url, name in names.items())
        raise ConfigError(
            f"a router needs one name of the model ({listed}): start each server with the same "
            "--kvpersist-served-name"
        )
    aliases = [f"{name}={model}" for name in (_MODEL, _CLAUDE_MODEL) if name != model]
    command = [
        *("smg", "launch", "--host", "127.0.0.1", "--port", "30000"),
        *("--prometheus-host", "127.0.0.1", "--disable-tokenizer-autoload"),
        *("--policy", "cache_aware", "--health-check-interval-secs", "5"),
        *(word for alias in aliases for word in ("--model-alias", alias)),
        *("--worker-urls", *urls),
    ]
    return shlex.join(command)


ROUTER = router.__name__
CLIENTS: dict[str, Callable[[str, int | None], Client]] = {
    function.__name__: function for function in (claude, codex, opencode, aider, openwebui)
}
