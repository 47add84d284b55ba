"""If a user edits a reply, the model reads the edited text, on every API."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer

from tests.support import Message, ServerProcess, StartServer
from tests.support.reply import parse_outcome
from tests.support.scripted import ScriptedServer, make_thinking_model

from .stored import wait_for_writer

CODE = "def lamp(n):\n  for k in range(n):\n    if k:\n      light(k)\n\n  return n\n\n\nlamp(3)\n"
ASK: Message = {"role": "user", "content": "Write a function that lights lamps, please."}
NEXT: Message = {"role": "user", "content": "Go on."}
APIS = {
    "chat": ("/v1/chat/completions", "messages", "max_tokens"),
    "messages": ("/v1/messages", "messages", "max_tokens"),
    "responses": ("/v1/responses", "input", "max_output_tokens"),
}
EDITS: dict[str, Callable[[str], str]] = {
    "indentation": lambda text: text.replace("  ", "        "),
    "crlf": lambda text: text.replace("\n", "\r\n"),
    "line-breaks-behind": lambda text: text + "\n\n\n",
    "zero-width": lambda text: text.replace("range", "ra\u200bnge"),
}


def ask(server: ServerProcess, name: str, talk: list[Message], n_most: int) -> tuple[str, int, int]:
    """Return a reply's text, the tokens of its prompt, and how many of these were reused."""
    path, key, limit_field = APIS[name]
    body = {"model": "claude-local", limit_field: n_most, key: talk}
    status, headers, content = server.request("POST", path, body)
    assert status == 200
    reply: dict[str, Any] = json.loads(content)
    usage = reply["usage"]
    n_prompt = usage.get("prompt_tokens") or usage["input_tokens"]
    n_prompt += usage.get("cache_read_input_tokens", 0)
    if name == "chat":
        text = reply["choices"][0]["message"]["content"]
    else:
        parts = reply["content"] if name == "messages" else reply["output"][0]["content"]
        text = "".join(part["text"] for part in parts)
    return text, n_prompt, int(parse_outcome(headers["x-kvpersist"])["reused"])


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["hot", "killed"])
def test_edited_reply_is_read_as_edited_on_every_api(
    started: StartServer, models_dir: Path, tmp_path: Path, killed: bool
) -> None:
    model = make_thinking_model(models_dir / "edited")
    tokenizer: Any = load_tokenizer(model)
    scripted = ScriptedServer(started, model, tmp_path)
    server = scripted.process
    for api in APIS:
        for n_most in (len(tokenizer.encode(CODE)) - 6, 400):  # cut by max_tokens, and complete
            talk = [{**ASK, "content": f"{api} {n_most} {killed}: {ASK['content']}"}]
            scripted.say(CODE)
            text, n_asked, _ = ask(server, api, talk, n_most)
            assert CODE.startswith(text) and "return" in text
            assert (text == CODE) == (n_most == 400)
            wait_for_writer(server)
            if killed:
                server.restart(kill=True)
            for edit in EDITS.values():
                edited: Message = {"role": "assistant", "content": edit(text)}
                messages = [*talk, edited, NEXT]
                rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
                scripted.say("Yes.")
                _, n_prompt, n_reused = ask(server, api, messages, 8)
                assert n_prompt == len(rendered), (api, n_most)
                assert n_reused < n_asked + len(tokenizer.encode(text)) + 2
            same: Message = {"role": "assistant", "content": text}
            scripted.say("Yes.")
            n_reused = ask(server, api, [*talk, same, NEXT], 8)[2]
            assert n_reused >= n_asked + len(tokenizer.encode(text)) - 3, (api, n_most)


@pytest.mark.slow
def test_edited_text_completion_is_read_as_edited(
    started: StartServer, models_dir: Path, tmp_path: Path
) -> None:
    model = make_thinking_model(models_dir / "edited")
    tokenizer: Any = load_tokenizer(model)
    scripted = ScriptedServer(started, model, tmp_path)
    for n_most in (30, 400):
        scripted.say(CODE)
        begun = f"{n_most} # a function that lights lamps, and returns how many there are\n"
        text = scripted.process.complete(begun, max_tokens=n_most).text
        for edit in EDITS.values():
            reply = scripted.process.complete(begun + edit(text), max_tokens=2)
            assert reply.prompt_tokens == len(tokenizer.encode(begun + edit(text)))
