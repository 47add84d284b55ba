"""`mlx-lm-kvpersist demo`: kill the server in the middle of a conversation and go on."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..host.scheduling.model_provider import check_model_name
from .output import console, ongoing, shown
from .servers import Message, Reply, StartedServer, document

_MAX_TOKENS = 32
_QUESTIONS = ("Who was the keeper of the lock?", "What was Ruth Amsel sent to find out?")


def run(args: argparse.Namespace) -> int:
    """Run the demo; return 0 if the conversation came back from disk, else 1."""
    if args.model is not None:
        check_model_name(args.model)
    first = "make a tiny model with random weights" if args.model is None else f"take {args.model}"
    with (
        tempfile.TemporaryDirectory(prefix="kvpersist-demo-") as folder_name,
        ongoing(first) as say,
    ):
        folder, model = Path(folder_name), args.model
        if model is None:
            # Not at the top: importing mlx-lm takes seconds, in which nothing would be said.
            from .demo_model import make_model

            model = str(make_model(folder / "model"))
        replies = converse(model, folder, args.chars, say)
    print_line = console().print
    if args.model is not None:
        for question, reply in zip(_QUESTIONS, replies, strict=False):
            print_line(f"{question}\n> {shown(reply.text, 200)}")
    _, warm, stock = replies
    n_restored = int(warm.said("restored") or 0)
    if not n_restored:
        print_line("The conversation did not come back from disk.")
        return 1
    print_line(
        f"After kill -9 and a new start the next reply began after {warm.ttft_s:.2f} s, without "
        f"the plugin after {stock.ttft_s:.2f} s: {n_restored:,} of {warm.prompt_tokens:,} prompt "
        "tokens came from disk."
    )
    return 0


def converse(model: str, folder: Path, n_chars: int, say: Callable[[str], None]) -> list[Reply]:
    """Return the replies before kill -9, after it, and of stock; the servers log into `folder`.

    Raises KVPersistError if a server does not start or does not answer.
    """
    first, second = _QUESTIONS
    messages: list[Message] = [{"role": "user", "content": f"{document(n_chars)}\n\n{first}"}]

    def ask(server: StartedServer) -> Reply:
        return server.chat(messages, "demo", _MAX_TOKENS)

    plugin = ["--plugin", "kvpersist", "--kvpersist-dir", str(folder / "store")]
    say("1 of 5: mlx_lm.server starts with the plugin")
    with StartedServer(model, *plugin, log_path=folder / "plugin.log") as server:
        say("2 of 5: it reads a long text")
        before = ask(server)
        server.wait_until_written()
        say("3 of 5: kill -9, and a new start")
        server.kill9()
        server.start()
        messages.append({"role": "assistant", "content": before.text})
        messages.append({"role": "user", "content": second})
        after = ask(server)
    say("4 of 5: mlx_lm.server starts without the plugin")
    with StartedServer(model, log_path=folder / "stock.log") as server:
        say("5 of 5: it reads the same conversation")
        return [before, after, ask(server)]
