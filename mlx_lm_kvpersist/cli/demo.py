"""`mlx-lm-kvpersist demo`: kill the server in the middle of a conversation and go on.

The demo runs the stock server command as a subprocess, with and without the plugin, and reports
what a client sees: the time to the first token and how many tokens were not computed again.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from ..host.scheduling.model_provider import check_model_name
from .output import console, ongoing, shown
from .started_server import Message, Reply, StartedServer
from .story import document

SESSION = "demo"
_MAX_TOKENS = 32
_QUESTIONS = (
    "Who was the keeper of the lock?",
    "What was Ruth Amsel sent to find out?",
    "How long is the chamber?",
)


def run(args: argparse.Namespace) -> int:
    """Run the demo; return 0 if the conversation came back from disk, else 1."""
    if args.model is not None:
        check_model_name(args.model)
    out = console()
    with tempfile.TemporaryDirectory(prefix="kvpersist-demo-") as folder_name:
        folder = Path(folder_name)
        model = args.model
        if model is None:
            with ongoing("make a tiny model with random weights"):
                # Not at the top: importing mlx-lm takes seconds, in which nothing would be said.
                from .demo_model import make_model

                model = str(make_model(folder / "model"))
        *_, warm, stock = converse(model, args.model is None, folder, args.chars)
    n_restored = int(warm.said("restored") or 0)
    if n_restored:
        out.print(
            f"After kill -9, {n_restored:,} of {warm.prompt_tokens:,} prompt tokens came "
            f"from disk: first token after {warm.ttft_s:.2f} s, the stock server needs "
            f"{stock.ttft_s:.2f} s ({stock.ttft_s / warm.ttft_s:.1f} times as long)."
        )
    else:
        out.print("The conversation did not come back from disk.")
    return 0 if n_restored else 1


def converse(model: str, is_random: bool, folder: Path, n_chars: int) -> list[Reply]:
    """Play the conversation and return the reply to each request; the servers log into `folder`.

    The first request sends a text of `n_chars` characters; every request asks a question about it.
    Random weights are not measured, and their replies are not shown: they say nothing.
    Raises KVPersistError where a server does not start or does not answer.
    """
    messages: list[Message] = []
    replies: list[Reply] = []
    say = console().print

    def ask(server: StartedServer, name: str, what: str, *, is_new_turn: bool = True) -> None:
        if is_new_turn:
            if replies:
                messages.append({"role": "assistant", "content": replies[-1].text})
            before = "" if replies else f"{document(n_chars)}\n\n"
            messages.append({"role": "user", "content": before + _QUESTIONS[len(replies)]})
        with ongoing(f"  {name}: {what}"):
            reply = server.chat(messages, SESSION, _MAX_TOKENS)
        replies.append(reply)
        header = reply.outcome or "no X-KVPersist header"
        say(f"  {name}: {what}: first token after {reply.ttft_s:.2f} s ({header})")
        if not is_random:
            question = messages[-1]["content"].rpartition("\n")[2]
            say(f"    {question}\n    > {shown(reply.text, 200)}")

    store = folder / "store"
    plugin = ["--plugin", "kvpersist", "--kvpersist-dir", str(store)]
    if is_random:
        plugin += ["--kvpersist-kv-bits", "8"]
    say(f"mlx_lm.server --model {model} {' '.join(plugin)}")
    with ongoing("  start"):
        server = StartedServer(model, *plugin, log_path=folder / "plugin.log")
    with server:
        ask(server, "kvpersist", "first request")
        ask(server, "kvpersist", "next turn")
        server.wait_until_written()
        say("kill -9, and the same command again")
        server.kill9()
        with ongoing("  start"):
            server.start()
        ask(server, "kvpersist", "turn after kill -9")
    say("the same request to a fresh server without the plugin")
    with ongoing("  start"):
        server = StartedServer(model, log_path=folder / "stock.log")
    with server:
        ask(server, "stock", "turn after restart", is_new_turn=False)
    return replies
