"""Images in conversations, on each API, with a text model and with a vision model."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.cli.conftest import CommandLine
from tests.support import (
    FULL_PRECISION,
    Message,
    ServerProcess,
    StartServer,
    synthetic_text,
    wait_until,
)
from tests.support.scripted import make_thinking_model
from tests.support.vision import LAUNCHER, SIDE, make_vision_model, picture

from .stored import n_tokens, wait_for_reply

LINE = "[image/png, not shown: this model reads text only]"
NEWEST = (
    "the newest message has image/png, expected text: this model reads nothing else; "
    "send the message without it"
)


class Image:
    """Stands for an image in a conversation."""


def png() -> str:
    """Return a picture of one token, in base64."""
    return picture(SIDE, SIDE).partition(",")[2]


# A conversation is a list of (kind, part, …): "user", "assistant", "call", "result". A part is a
# text or Image.
Talk = list[tuple[Any, ...]]


def chat(talk: Talk) -> dict[str, Any]:
    def parts(given: tuple[Any, ...]) -> list[dict[str, Any]]:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png()}"}}
        return [image if part is Image else {"type": "text", "text": part} for part in given]

    function = {"name": "look", "arguments": "{}"}
    calls = [{"id": "1", "type": "function", "function": function}]
    made: dict[str, Callable[..., dict[str, Any]]] = {
        "user": lambda *given: {"role": "user", "content": parts(given)},
        "assistant": lambda text: {"role": "assistant", "content": text},
        "call": lambda: {"role": "assistant", "content": "", "tool_calls": calls},
        "result": lambda *given: {"role": "tool", "tool_call_id": "1", "content": parts(given)},
    }
    return {"messages": [made[kind](*given) for kind, *given in talk]}


def messages(talk: Talk) -> dict[str, Any]:
    def blocks(given: tuple[Any, ...]) -> list[dict[str, Any]]:
        source = {"type": "base64", "media_type": "image/png", "data": png()}
        image = {"type": "image", "source": source}
        return [image if part is Image else {"type": "text", "text": part} for part in given]

    def result(*given: Any) -> dict[str, Any]:
        block = {"type": "tool_result", "tool_use_id": "1", "content": blocks(given)}
        return {"role": "user", "content": [block]}

    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    made: dict[str, Callable[..., dict[str, Any]]] = {
        "user": lambda *given: {"role": "user", "content": blocks(given)},
        "assistant": lambda text: {"role": "assistant", "content": text},
        "call": lambda: {"role": "assistant", "content": [call]},
        "result": result,
    }
    return {"messages": [made[kind](*given) for kind, *given in talk]}


def responses(talk: Talk) -> dict[str, Any]:
    def parts(given: tuple[Any, ...]) -> list[dict[str, Any]]:
        image = {"type": "input_image", "image_url": f"data:image/png;base64,{png()}"}
        return [image if part is Image else {"type": "input_text", "text": part} for part in given]

    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1"}
    made: dict[str, Callable[..., dict[str, Any]]] = {
        "user": lambda *given: {"role": "user", "content": parts(given)},
        "assistant": lambda text: {"role": "assistant", "content": text},
        "call": lambda: call,
        "result": lambda *given: {**output, "output": parts(given)},
    }
    return {"input": [made[kind](*given) for kind, *given in talk]}


APIS = {
    "/v1/chat/completions": chat,
    "/v1/messages": messages,
    "/v1/responses": responses,
}
every_api = pytest.mark.parametrize("path", APIS)


def ask(server: ServerProcess, path: str, talk: Talk, **headers: str) -> tuple[int, Any]:
    body = {**APIS[path](talk), "model": "default_model"}
    body["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = 4
    status, _, answer = server.request("POST", path, body, headers)
    return status, json.loads(answer)


def counts(server: ServerProcess, path: str, talk: Talk) -> tuple[int, int]:
    """Return how many tokens the prompt of a conversation has, and how many were reused."""
    status, answer = ask(server, path, talk)
    assert status == 200, answer
    usage = answer["usage"]
    if path == "/v1/chat/completions":
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    if path == "/v1/responses":
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    n_cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + usage["cache_creation_input_tokens"] + n_cached, n_cached


@pytest.fixture(scope="module")
def text_server(started: StartServer, models_dir: Path) -> ServerProcess:
    return started.with_plugin(make_thinking_model(models_dir / "text-only"))


@pytest.fixture(scope="module")
def vision_model(models_dir: Path) -> Path:
    return make_vision_model(models_dir / "images")


@pytest.fixture(scope="module")
def start_vision(vision_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Start servers of the model that reads images."""
    launcher = tmp_path_factory.mktemp("images") / "images.py"
    launcher.write_text(LAUNCHER, encoding="utf-8")

    def start(starter: StartServer, *options: str) -> ServerProcess:
        return starter.with_plugin(vision_model, *options, launcher=(str(launcher),))

    return start


@pytest.fixture(scope="module")
def vision_server(started: StartServer, start_vision: Any) -> ServerProcess:
    made: ServerProcess = start_vision(started)
    return made


@every_api
@pytest.mark.parametrize(
    "talk",
    [
        [("user", "Read a.png."), ("call",), ("result", Image)],
        [("user", "Read it."), ("call",), ("result", "It is:", Image, "So.")],
        [("user", "And this?", Image), ("assistant", "A ship."), ("user", "Sure?")],
        [("user", Image, "Read it."), ("call",), ("result", "Done.")],
        [("user", "Read all."), ("call",), ("result", "Read."), ("user", Image)],
    ],
)
def test_text_model_reads_one_line_instead_of_an_image(
    text_server: ServerProcess, path: str, talk: Talk
) -> None:
    n_prompt, _ = counts(text_server, path, talk)
    in_words = [(kind, *(text_of(given, i) for i in range(len(given)))) for kind, *given in talk]
    assert counts(text_server, path, in_words) == (n_prompt, n_prompt - 1)
    later = [*talk, ("assistant", "I see."), ("user", "Go on.")]
    n_later, n_reused = counts(text_server, path, later)
    assert n_later > n_prompt and n_reused >= n_prompt - 5
    assert (
        counts(text_server, path, [*later, ("assistant", "Yes."), ("user", "More.")])[1] >= n_reused
    )


def text_of(given: list[Any], i: int) -> str:
    line = "\n" * (i > 0) + LINE + "\n" * (i + 1 < len(given))
    return line if given[i] is Image else str(given[i])


@every_api
def test_text_model_refuses_an_image_in_the_newest_message(
    text_server: ServerProcess, path: str
) -> None:
    talk: Talk = [("user", "Hi."), ("assistant", "Hello."), ("user", "What is this?", Image)]
    status, answer = ask(text_server, path, talk)
    assert (status, answer["error"]["message"]) == (400, NEWEST)
    assert counts(text_server, path, [*talk, ("user", "Then not.")])[0] > 0


@every_api
@pytest.mark.parametrize(
    "talk",
    [
        [("user", "What is this?", Image)],
        [("user", Image, "What?"), ("assistant", "A ship."), ("user", "Sure?")],
        [("user", "Read it."), ("call",), ("result", "It is:", Image)],
        [("user", "Read it."), ("call",), ("result", Image), ("assistant", "A."), ("user", "?")],
    ],
)
def test_vision_model_reads_images_in_any_message(
    vision_server: ServerProcess, path: str, talk: Talk
) -> None:
    twice = [
        (kind, *(each for part in given for each in [part] * (1 + (part is Image))))
        for kind, *given in talk
    ]
    n_one, n_two = counts(vision_server, path, talk)[0], counts(vision_server, path, twice)[0]
    assert n_two - n_one == 3 * sum(part is Image for _, *given in talk for part in given)


def letters_only(model: Path) -> dict[str, float]:
    """Return a `logit_bias` with which a reply is spelled as its text is encoded."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    n_tokens = tokenizer.get_vocab_size()
    texts = {i: tokenizer.decode([i], skip_special_tokens=False) for i in range(n_tokens)}
    return {str(i): -100.0 for i, text in texts.items() if not re.fullmatch(" [a-zA-Z]", text)}


class ImageTalk:
    """A conversation about pictures that sends its replies back."""

    def __init__(self, store: Path, session: str, model: Path) -> None:
        self.store, self.session = store, session
        self.params: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0}
        self.params["logit_bias"] = letters_only(model)
        self.messages: list[Message] = [{"role": "system", "content": synthetic_text(200)}]
        self.reused: list[int] = []
        self.prompts: list[int] = []

    def turn(self, server: ServerProcess, question: str, *urls: str) -> str:
        """Ask with pictures, then a question; return the reply."""
        images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        content = [*images, {"type": "text", "text": question}]
        self.messages.append({"role": "user", "content": content if urls else question})
        reply = server.chat(self.messages, self.session, **self.params)
        self.messages.append({"role": "assistant", "content": reply.text})
        self.reused.append(reply.cached_tokens)
        self.prompts.append(reply.prompt_tokens)
        known = reply.prompt_tokens + reply.completion_tokens - 1  # the last token was not computed
        wait_until(lambda: n_tokens(self.store, self.session) >= known, f"{known} tokens")
        wait_for_reply(server)
        return reply.text


LARGE, WIDE, SMALL = (20 * SIDE, 15 * SIDE), (9 * SIDE, 4 * SIDE), (SIDE, SIDE)
TURNS = {
    "an image first": [[LARGE], [], [SMALL, WIDE]],
    "an image later": [[], [LARGE, LARGE], []],
    "an image in each turn": [[SMALL], [WIDE], [LARGE]],
}


@pytest.mark.parametrize(
    "precision",
    [pytest.param((), marks=pytest.mark.slow), FULL_PRECISION],
    ids=["default", "full precision"],
)
def test_conversations_with_images_survive_kill_9(
    start_server: StartServer, start_vision: Any, vision_model: Path, precision: tuple[str, ...]
) -> None:
    """Each reply equals a reply without reuse, and no stored token is computed again."""
    server = start_vision(start_server, *precision)
    talks = {name: ImageTalk(start_server.store, name, vision_model) for name in TURNS}
    replies: dict[str, list[str]] = {name: [] for name in TURNS}
    for number in range(3):
        for name, talk in talks.items():
            urls = [
                picture(*size, changed=(number, i)) for i, size in enumerate(TURNS[name][number])
            ]
            replies[name].append(talk.turn(server, f"{name}: {number}?", *urls))
        server.restart(kill=True)
    for talk in talks.values():
        assert all(
            reused >= prompt - 1
            for reused, prompt in zip(talk.reused[1:], talk.prompts, strict=False)
        ), (talk.reused, talk.prompts)
    server.stop()
    cold: ServerProcess
    if precision:
        cold = start_server(vision_model, launcher=server.launcher)  # stock
    else:
        folder = str(start_server.store.with_name("another"))
        cold = start_vision(start_server, "--kvpersist-dir", folder)
    for name, talk in talks.items():
        for number in range(3):
            messages = [spelled(message) for message in talk.messages[: 2 * number + 2]]
            reply = cold.chat(messages, headers={"X-KVPersist-Keep": "no"}, **talk.params)
            assert reply.text == replies[name][number], (name, number)
            assert reply.prompt_tokens == talk.prompts[number]


@pytest.mark.slow
def test_commands_export_import_and_rebuild_conversations_with_images(
    start_server: StartServer,
    start_vision: Any,
    vision_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After export, deletion, import and a rebuilt index, the conversation is the same."""
    server = start_vision(start_server)
    talk = ImageTalk(start_server.store, "shown", vision_model)
    talk.turn(server, "What is this?", picture(*LARGE))
    talk.turn(server, "", picture(*SMALL), picture(*WIDE))  # a reply comes right after an image
    talk.turn(server, "And now?")
    assert talk.reused[2] >= talk.prompts[1] - 1
    run = CommandLine(start_server.store, capsys)
    assert "shown" in {record["session"] for record in run.json("why")}
    server.stop()
    file = tmp_path / "shown.kv"
    shown = run.json("sessions", "show", "shown")
    assert shown["tokens"] >= talk.prompts[-1] and "And now?" in shown["text_end"]
    run.json("sessions", "export", "shown", file)
    run.json("sessions", "rm", "--all", "--yes")
    assert run.ids() == {} and run.json("sessions", "import", file)["is_new"]
    assert run.json("store", "verify")["ok"]
    (run.folder / "index.sqlite").unlink()
    assert run("store", "rebuild") == 0 and run.json("store", "verify")["ok"]
    again = run.json("sessions", "show", "shown")
    assert [again[name] for name in ("tokens", "chain")] == [shown["tokens"], shown["chain"]]
    server.restart()
    talk.turn(server, "Sure?")
    # The exported file and a rebuilt index do not have the ids of earlier replies.
    assert talk.reused[3] >= talk.prompts[0] - 1


def spelled(message: Message) -> Message:
    """Return a message with the leading space that the server drops from a reply."""
    if message["role"] == "assistant":
        return {**message, "content": f" {message['content'].lstrip()}"}
    return message


def test_image_reuse_depends_on_pixels_not_on_format_or_transport(
    start_server: StartServer,
    start_vision: Any,
    vision_model: Path,
    served: Callable[[bytes], str],
) -> None:
    server = start_vision(start_server)
    talk = ImageTalk(start_server.store, "ways", vision_model)
    first = picture(*WIDE)
    talk.turn(server, "What is this?", first)

    def n_reused(url: str) -> int:
        messages = json.loads(json.dumps(talk.messages))
        messages[1]["content"][0]["image_url"]["url"] = url
        messages.append({"role": "user", "content": "Sure?"})
        return int(server.chat(messages, "ways", **talk.params).cached_tokens)

    same = [
        first,
        picture(*WIDE, form="BMP"),
        served(base64.b64decode(first.partition(",")[2])),
    ]
    n_known = talk.prompts[0]
    assert all(n_reused(url) >= n_known for url in same)
    assert n_reused(picture(*WIDE, changed=(3, 2))) < n_known - 9 * 4


@pytest.fixture
def served() -> Iterator[Callable[[bytes], str]]:
    """Serve a picture over HTTP, and return its URL."""
    servers: list[ThreadingHTTPServer] = []

    def serve(content: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "image/png")
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=partial(server.serve_forever, 0.05), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/a.png"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def test_images_are_not_stored_if_the_request_forbids_it(vision_server: ServerProcess) -> None:
    path, talk = "/v1/chat/completions", [("user", Image, "A secret.")]
    for _ in range(2):
        status, answer = ask(vision_server, path, talk, **{"X-KVPersist-Keep": "no"})
        assert (status, answer["usage"]["prompt_tokens_details"]["cached_tokens"]) == (200, 0)
