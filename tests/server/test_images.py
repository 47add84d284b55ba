"""Images in conversations, on each API, with a model of text and with one that reads images."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import ServerProcess, StartServer, wait_until
from tests.support.scripted import TEMPLATE, make_thinking_model

LINE = "[image/png, not shown: this model reads text only]"
NEWEST = (
    "the newest message has image/png, expected text: this model reads nothing else; "
    "send the message without it"
)
PATCHES = 4
"""Tokens of an image."""

_LAUNCHER = f"""
import sys

import mlx.core as mx
import mlx_lm.server as stock
from mlx_lm.models.llama import Model


class Processor:
    image_token = "<|patch|>"

    def __call__(self, text, *, images):
        pixels = [mx.array(image).astype(mx.float32).mean() / 255 for image in images]
        return text.replace(self.image_token, self.image_token * {PATCHES} + " "), pixels


def embed_inputs(self, ids, *, pixel_values):
    return self.model.embed_tokens(ids) + sum(pixel_values)


Model.embed_inputs = embed_inputs
stock.load_processor = lambda model, config: Processor()
from mlx_lm_kvpersist._startup import serve

serve(sys.argv[1:])
"""

IMAGE_TEMPLATE = TEMPLATE.replace(
    "{{ message.content or '' }}",
    "{%- if message.content is string %}{{ message.content }}{%- else %}"
    "{%- for part in message.content or [] %}"
    "{{ part.text if part.type == 'text' else '<|patch|>' if message.role == 'user' }}"
    "{%- endfor %}{%- endif %}",
)


class Image:
    """Stands for an image in a conversation."""


def png() -> str:
    """Return the smallest picture, in base64."""
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (1, 1)).save(written := io.BytesIO(), "PNG")
    return base64.b64encode(written.getvalue()).decode()


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
def of_text(started: StartServer, models_dir: Path) -> ServerProcess:
    return started.with_plugin(make_thinking_model(models_dir / "text-only"))


@pytest.fixture(scope="module")
def of_images(
    started: StartServer, models_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> ServerProcess:
    if not hasattr(pytest.importorskip("mlx_lm.server"), "load_processor"):
        pytest.skip("no processors of images before mlx-lm 0.32.1")
    tokens = "<think>", "</think>", "<|patch|>"
    model = make_thinking_model(
        models_dir / "images", chat_template=IMAGE_TEMPLATE, extra_special_tokens=tokens
    )
    launcher = tmp_path_factory.mktemp("images") / "images.py"
    launcher.write_text(_LAUNCHER, encoding="utf-8")
    return started.with_plugin(model, launcher=(str(launcher),))


def test_what_stock_keeps_of_images_is_a_part_of_the_memory(of_images: ServerProcess) -> None:
    def are_kept() -> bool:
        counts(of_images, "/v1/chat/completions", [("user", "What is this?", Image)])
        stats = json.loads(of_images.request("GET", "/v1/kvpersist/stats")[2])
        return bool(stats["memory"]["stock"] > 0)

    wait_until(are_kept, "what stock keeps", 60)


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
def test_a_model_of_text_is_told_of_an_image_in_one_line(
    of_text: ServerProcess, path: str, talk: Talk
) -> None:
    n_prompt, _ = counts(of_text, path, talk)
    in_words = [(kind, *(text_of(given, i) for i in range(len(given)))) for kind, *given in talk]
    assert counts(of_text, path, in_words) == (n_prompt, n_prompt - 1)
    later = [*talk, ("assistant", "I see."), ("user", "Go on.")]
    n_later, n_reused = counts(of_text, path, later)
    assert n_later > n_prompt and n_reused >= n_prompt - 5
    assert counts(of_text, path, [*later, ("assistant", "Yes."), ("user", "More.")])[1] >= n_reused


def text_of(given: list[Any], i: int) -> str:
    line = "\n" * (i > 0) + LINE + "\n" * (i + 1 < len(given))
    return line if given[i] is Image else str(given[i])


@every_api
def test_a_model_of_text_refuses_an_image_in_the_question(
    of_text: ServerProcess, path: str
) -> None:
    talk: Talk = [("user", "Hi."), ("assistant", "Hello."), ("user", "What is this?", Image)]
    status, answer = ask(of_text, path, talk)
    assert (status, answer["error"]["message"]) == (400, NEWEST)
    assert counts(of_text, path, [*talk, ("user", "Then not.")])[0] > 0


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
def test_a_model_of_images_reads_them_wherever_they_stand(
    of_images: ServerProcess, path: str, talk: Talk
) -> None:
    twice = [
        (kind, *(each for part in given for each in [part] * (1 + (part is Image))))
        for kind, *given in talk
    ]
    n_one, n_two = counts(of_images, path, talk)[0], counts(of_images, path, twice)[0]
    assert n_two - n_one == PATCHES + 1


def test_an_image_cannot_be_asked_not_to_be_kept(of_images: ServerProcess) -> None:
    """Prompts with images are in the stock server's own cache."""
    path, talk = "/v1/chat/completions", [("user", Image)]
    status, answer = ask(of_images, path, talk, **{"X-KVPersist-Keep": "no"})
    assert status == 400 and "leave out the header or the images" in answer["error"]["message"]
