"""The command line `mlx-lm-kvpersist`: one parser tree for all commands.

Only the module of the command that runs is imported: `--help` and `doctor` need no working MLX.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import signal
import sqlite3
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NoReturn

from .. import __version__
from .._startup import serve
from ..config import add_options
from ..errors import KVPersistError, remedy
from ..host.patching import versions
from ..host.stopping import requested_plugins, with_nearest
from ..units import parse_days, parse_size

PROG = "mlx-lm-kvpersist"
_STORE = ("dir", "encrypt")
_OF_RANKS = ("sessions", "store", "why")
_BUDGETS = (*_STORE, "disk", "min-free")
_SIGPIPE_STATUS = 141
"""The exit status if stdout is a closed pipe, as in shells: 128 + SIGPIPE (13)."""
_WHICH = "a session's id, the beginning or end of an id, or a session's name or title"


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors suggest a command or an option.

    commands: the parsers of a group's commands by name; empty if the parser is for a command. If
    arguments are missing, the error also shows the epilog, which is an example.
    """

    commands: Mapping[str, CommandParser] = MappingProxyType({})

    def error(self, message: str) -> NoReturn:
        is_bare = message.startswith("the following arguments are required")
        example = f"\n{self.epilog}" if self.epilog and is_bare else ""
        super().error(with_nearest(message, self._option_string_actions) + example)

    def check_command(self, words: Sequence[str]) -> None:
        """End the process with a suggestion unless `words` begin with a command."""
        parser = self
        for depth, word in enumerate(words):
            if not parser.commands:
                return
            if word.startswith("-"):
                option = word.partition("=")[0]
                if option not in parser._option_string_actions and parser._knows(option):
                    self.exit(2, f"{parser.prog}: write {word} after the command\n")
                return
            if word not in parser.commands:
                near = self._nearest(words, depth)
                advice = f"did you mean `{near}`?" if near else f"type `{parser.prog} --help`"
                self.exit(2, f"{parser.prog}: there is no command {word!r}; {advice}\n")
            parser = parser.commands[word]

    def _knows(self, option: str) -> bool:
        """Tell whether this parser or a command below it has the option."""
        below = self.commands.values()
        return option in self._option_string_actions or any(own._knows(option) for own in below)

    def _nearest(self, words: Sequence[str], depth: int) -> str:
        """Return the command most like `words`, or "". The first `depth` words name a group."""
        names = [*self.commands]
        for outer, parser in self.commands.items():
            names += [f"{outer} {name}" for name in parser.commands]
        group = "".join(f"{word} " for word in words[:depth])
        in_group = {name.removeprefix(group): name for name in names if name.startswith(group)}
        by_last_word = {name.split()[-1]: name for name in names}
        for typed, known in ((" ".join(words[depth:2]), in_group), (words[depth], by_last_word)):
            for near in get_close_matches(typed, known, 1):
                return known[near]
        return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status; a KVPersistError is one line on stderr."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # was closed before the start
            setattr(sys, name, open(os.devnull, "w"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an ASCII terminal shows "?" for other characters
    parser = make_parser()
    parser.check_command(sys.argv[1:] if argv is None else argv)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        fail = args.error if "error" in args else parser.error
        blanks = "" if unknown[0].startswith("-") else "; a name with blanks needs quotes"
        fail(f"unrecognized arguments: {' '.join(unknown)}{blanks}")
    if "run" not in args:
        args.print_help()
        return 0
    module, _, function = args.run.partition(":")
    try:
        if getattr(args, "model", None):  # fail before slow imports
            versions.check()
            if not os.environ.get("MLXLM_USE_MODELSCOPE"):  # if set, mlx-lm uses another hub
                _imported("bench").fetched(args.model)
        run = getattr(_imported(module), function)
        result = _of_each_rank(run, args) if args.command in _OF_RANKS else run(args)
        status: int = result if isinstance(result, int) else result.tell(args)
        sys.stdout.flush()
        return status
    except KVPersistError as error:
        message = str(error)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _SIGPIPE_STATUS
    except PermissionError as error:
        message = f"no permission for {error.filename}; run the command as the owner of the folder"
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        message += remedy(error)
    except sqlite3.Error as error:
        message = f"the index of the store cannot be used: {error}"
    except KeyboardInterrupt as ended:
        return 128 + next(iter(ended.args), signal.SIGINT)  # as in shells
    print(f"{PROG} {args.command}: {message}", file=sys.stderr)
    return 1


def _imported(module: str) -> ModuleType:
    """Import the module of a command. Raises UnsupportedVersion if mlx-lm lacks an import."""
    try:
        return importlib.import_module(f"{__package__}.{module}")
    except ImportError:
        versions.check()
        raise


def _of_each_rank(run: Callable[..., Any], args: argparse.Namespace) -> int:
    """Run a command on one store, or on each rank's store. Fails if all stores fail."""
    from .opening import folders_of

    folders = folders_of(args)
    if args.command == "why":
        folders = folders[:1]  # only rank 0 has clients
    if len(folders) == 1:
        args.kvpersist_dir = folders[0]
        return int(run(args).tell(args))
    if "file" in args:
        names = ", ".join(map(str, folders))
        raise KVPersistError(
            f"a file belongs to one store; name the store with --kvpersist-dir: {names}"
        )
    statuses: list[int] = []
    contents: dict[str, Any] = {}
    errors: dict[str, KVPersistError] = {}
    for folder in folders:
        if not args.json:
            print(f"{folder.name}:")
        try:
            report = run(argparse.Namespace(**{**vars(args), "kvpersist_dir": folder}))
        except KVPersistError as error:
            errors[folder.name] = error
            continue
        contents[folder.name] = report.content
        statuses.append(report.status if args.json else report.tell(args))
    if not statuses:
        raise next(iter(errors.values()))
    if args.json:
        print(json.dumps(contents, indent=2))
    for name, missed in errors.items():
        print(f"{PROG} {args.command}: {name}: {missed}", file=sys.stderr)
    return max(statuses)


def run_server(args: argparse.Namespace) -> int:
    plugin = [] if requested_plugins(args.options) else ["--plugin", "kvpersist"]
    serve([*plugin, *args.options])
    return 0


def make_parser() -> CommandParser:
    """Return the parser of all commands.

    The parser sets `run` ("module:function"), `command` (the command's first word) and `error`,
    which ends the process with the command's usage and status 2.
    """
    parser = CommandParser(
        prog=PROG,
        description="Persistent memory for mlx_lm.server.",
        epilog=_example("server --model MODEL"),
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = _commands(parser, "command", "Most people need the first five only.")
    summary = "say whether --plugin works here and, if not, why"
    _adder(commands, *_STORE)("doctor", "doctor:run", summary)
    add = _adder(commands)
    # With this prefix no argument is an option: mlx_lm.server gets all arguments.
    summary = "run mlx_lm.server with the plugin; needs no .pth file"
    server = add("server", "main:run_server", summary, add_help=False, prefix_chars="\0")
    server.add_argument("options", nargs=argparse.REMAINDER)
    _add_connect(add)
    _add_why(commands)
    summary = "list, pin, export and remove the sessions of a store"
    _add_sessions(_group(commands, "sessions", summary, "sessions list --sort size"))
    _add_warm(add)
    _add_store(_group(commands, "store", "check, repair and shrink a store", "store map"))
    key = add("key", "store:key", "make the key file of an encrypted store")
    key.add_argument(
        "file", type=Path, metavar="FILE", help="the file to make; only you can read it"
    )
    _add_measuring(commands)
    return parser


def _example(command: str) -> str:
    return f"For example: {PROG} {command}"


def _group(commands: Any, name: str, summary: str, example: str) -> Any:
    group = commands.add_parser(name, help=summary, description=summary, epilog=_example(example))
    return _commands(group, "subcommand")


def _commands(parser: CommandParser, dest: str, summary: str | None = None) -> Any:
    parser.set_defaults(print_help=parser.print_help)  # for a call without a subcommand
    commands = parser.add_subparsers(
        dest=dest, title="commands", metavar="COMMAND", description=summary
    )
    parser.commands = commands.choices
    return commands


def _adder(commands: Any, *names: str) -> Any:
    """Return a function that adds a command. names: its options, e.g. "dir": --kvpersist-dir."""

    def add(
        name: str, run: str, summary: str, *, json: bool = bool(names), **options: Any
    ) -> argparse.ArgumentParser:
        description = f"{summary[0].upper()}{summary[1:]}."
        command: argparse.ArgumentParser = commands.add_parser(
            name, help=summary, description=description, **options
        )
        command.set_defaults(run=run, error=command.error)
        if names:
            add_options(command, *names)
        if json:
            command.add_argument("--json", action="store_true", help="print JSON")
        return command

    return add


def _add_connect(add: Any) -> None:
    connect = add("connect", "connect:run", "configure a client for a server of this machine")
    connect.epilog = _example("connect claude --write")
    connect.add_argument(
        "client",
        choices=("claude", "codex", "opencode", "aider", "openwebui", "router"),
        help="the program to configure; router: a router in front of several servers",
    )
    port = "the server's port (default: %(default)s)"
    connect.add_argument("--port", type=int, default=8080, help=port)
    connect.add_argument(
        "--server",
        action="append",
        metavar="URL",
        help="a running server behind the router, such as http://mac-2.local:8080; can be given "
        "more than once",
    )
    change = connect.add_mutually_exclusive_group()
    change.add_argument(
        "--write",
        action="store_true",
        help="write the settings to a separate file or into the client's file, and show the "
        "difference",
    )
    connect.add_argument(
        "--global",
        dest="for_all",
        action="store_true",
        help="claude: change its settings for all projects instead of writing a separate file",
    )
    change.add_argument(
        "--undo", action="store_true", help="restore the client's files as they were before --write"
    )


def _add_measuring(commands: Any) -> None:
    add = _adder(commands)
    bench = add("bench", "bench:run", "compare the speed with the stock server's")
    bench.add_argument("--model", required=True, help="a folder, or a name on the hub")
    bench.add_argument(
        "--minutes",
        type=float,
        default=5.0,
        help="maximum time; more allows longer prompts, up to 16,384 tokens (default: %(default)g)",
    )
    bench.add_argument("--json", type=Path, metavar="FILE", help="also write all samples to FILE")
    demo = add("demo", "demo:run", "kill a server, and see that the conversation continues")
    made = "a model to serve (default: a tiny model with random weights, made now)"
    demo.add_argument("--model", help=made)
    demo.add_argument(
        "--chars",
        type=_count,
        default=12_000,
        help="characters of the prompt text (default: %(default)s, about 4,000 tokens)",
    )
    summary = "measure what every KV precision changes in a model's output"
    quality = add("quality", "quality:run", summary, json=True)
    quality.description = (
        "Measure what every KV precision changes in a model's output: the next tokens of a text "
        "and of short texts in many languages and formats, replies to questions about a long "
        "context, facts hidden in the context, and a chain of tool calls."
    )
    quality.add_argument("--model", required=True, help="a folder, or a name on the hub")
    quality.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 (default: a short story)")
    quality.add_argument(
        "--context",
        type=int,
        default=4096,
        metavar="TOKENS",
        help="length of the context in which facts are hidden, the slowest step; 0 leaves out this "
        "step (default: %(default)s)",
    )
    summary = "load a model and say how its cache is stored"
    spec = _adder(commands, "kv-bits")("spec", "spec:run", summary)
    spec.add_argument("--model", required=True, help="a folder, or a name on the hub")
    spec.add_argument("--adapter-path", help="a folder with a trained adapter")
    summary = "test every patch, start the plugin, and check its results"
    selftest = add("selftest", "selftest:run", summary, json=True)
    page = (
        "also check and measure MLX on this machine, and print a report for an issue; takes minutes"
    )
    selftest.add_argument("--machine", action="store_true", help=page)
    selftest.add_argument(
        "server_options",
        nargs="*",
        metavar="SERVER OPTION",
        help="after --, options for the server; --plugin NAME starts other plugins than kvpersist",
    )


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a count; write for example 20")
    return int(text)


def _add_sessions(commands: Any) -> None:
    add = _adder(commands, *_STORE)
    listed = add("list", "sessions:list_all", "list sessions, the most recently used first")
    listed.description = (
        "List sessions, the most recently used first: a line each in a terminal, tab-separated "
        "values in a pipe. Sizes count shared blocks in full."
    )
    matched = "text in the name, the title, the first words, the client or the id"
    listed.add_argument("text", metavar="TEXT", nargs="?", help=matched)
    orders = ("used", "size", "tokens", "name")
    what = "what comes first: last used, largest, most tokens, or by name (default: %(default)s)"
    listed.add_argument("--sort", choices=orders, default="used", help=what)
    listed.add_argument("--limit", type=_count, metavar="N", help="list the first N sessions")
    show = add("show", "sessions:show", "show one session with its blocks")
    rm = add("rm", "sessions:rm", "remove sessions and the blocks that no other session needs")
    rm.add_argument("sessions", metavar="ID|NAME", nargs="*", help=_WHICH)
    rm.add_argument("--all", action="store_true", help="remove every session")
    rm.add_argument("--yes", action="store_true", help="confirm --all")
    pin = add("pin", "sessions:pin", "never remove a session to make room")
    unpin = add("unpin", "sessions:pin", "let a session be removed to make room again")
    rename = add("rename", "sessions:rename", "give a session a title for the page and commands")
    export = add("export", "sessions:export", "write a session to one file")
    for command in (show, pin, unpin, rename, export):
        command.add_argument("session", metavar="ID|NAME", help=_WHICH)
    new = "the title; '' removes it. Requests keep the name that the client sends"
    rename.add_argument("title", metavar="NEW", help=new)
    export.add_argument("file", type=Path, metavar="FILE", help="a safetensors file to make")
    export.add_argument("--force", action="store_true", help="replace FILE if it exists")
    add = _adder(commands, *_BUDGETS)
    load = add("import", "sessions:load", "add a session from a file that export has written")
    load.description = (
        "Add a session from a file that export has written. Give the server's --kvpersist-disk and "
        "--kvpersist-min-free: otherwise conversations above the default budgets are deleted, even "
        "if the server's budgets are larger."
    )
    load.add_argument("file", type=Path, metavar="FILE", help="a file that export has written")


def _add_store(commands: Any) -> None:
    add = _adder(commands, *_BUDGETS)
    add("stats", "store:stats", "say what the store holds and what it may use")
    gc = add("gc", "store:gc", "remove the least recently used blocks until the budgets hold")
    gc.description = (
        "Remove the least recently used blocks until the budgets hold. Give the server's "
        "--kvpersist-disk and --kvpersist-min-free: otherwise conversations above the default "
        "budgets are deleted, even if the server's budgets are larger."
    )
    add = _adder(commands, *_STORE)
    add("map", "store:draw", "draw the bytes of a store by session, shared part and age")
    verify = add("verify", "store:verify", "check every file; exit status 1 if any is bad")
    verify.add_argument(
        "--fix", action="store_true", help="move bad files to quarantine, and remove unknown files"
    )
    add("rebuild", "store:rebuild", "rebuild the index from the files")
    summary = "remove the oldest objects of a shared store"
    prune = _adder(commands)("prune", "store:prune", summary, json=True)
    prune.add_argument("url", metavar="URL", help="the URL that --kvpersist-shared has")
    older = "remove objects that are older, such as 14d"
    prune.add_argument("--older", type=parse_days, metavar="AGE", help=older)
    size = "remove the oldest objects until this size is left, such as 200G"
    prune.add_argument("--size", type=parse_size, help=size)
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def _add_warm(add: Any) -> None:
    summary = "let a running server compute the beginning of prompts, and pin it"
    warm = add("warm", "sessions:warm", summary, json=True)
    warm.epilog = _example("warm prompt.json")
    content = "messages, or the body of a request, as JSON"
    warm.add_argument("file", type=Path, metavar="FILE", help=content)
    url = "the running server (default: %(default)s)"
    warm.add_argument("--url", default="http://127.0.0.1:8080", help=url)
    warm.add_argument("--name", help="the session's name (default: warm, and the file's name)")


def _add_why(commands: Any) -> None:
    add = _adder(commands, *_STORE)
    why = add("why", "why:run", "say what the last requests reused, and why not more")
    why.add_argument(
        "request",
        nargs="?",
        metavar="REQUEST_ID",
        help="the header X-KVPersist-Request of a reply, or the beginning or end of it (default: "
        "list all)",
    )
    why.add_argument(
        "--url",
        help="ask this running server, such as http://127.0.0.1:8080, instead of the store; a "
        "server quotes prompts only with --kvpersist-show-text",
    )
