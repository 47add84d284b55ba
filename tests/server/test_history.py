"""The content of a conversation never prevents its next turn from being served."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest

from tests.support import FULL_PRECISION, Message, ServerProcess, StartServer, make_tiny_model
from tests.support.histories import HISTORIES, answer, as_messages, as_responses, user
from tests.support.scripted import ScriptedServer
from tests.support.templates import SHAPES

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
FORMS = {
    CHAT: lambda history: {"messages": history, "max_tokens": 4},
    MESSAGES: as_messages,
    RESPONSES: as_responses,
}
TALK = [user("Hi.")]
NULLS = (
    *("model", "temperature", "top_p", "top_k", "stream", "stop", "seed", "tools", "user"),
    *("metadata", "tool_choice", "logprobs", "top_logprobs", "presence_penalty"),
    *("frequency_penalty", "stream_options", "max_tokens", "max_completion_tokens", "n"),
    *("logit_bias", "chat_template_kwargs", "response_format", "parallel_tool_calls"),
    *("system", "stop_sequences", "thinking", "instructions", "max_output_tokens", "reasoning"),
    *("include", "previous_response_id", "draft_model", "adapters", "min_p", "role_mapping"),
)


@pytest.fixture(scope="module")
def server(started: StartServer, tiny_model: Path) -> ServerProcess:
    return started.with_plugin(tiny_model)


def ask(server: ServerProcess, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    status, _, content = server.request("POST", path, body)
    return status, json.loads(content)


def reply_text(reply: dict[str, Any]) -> str:
    """Return the text of a reply of any API."""
    if "choices" in reply:
        return str(reply["choices"][0]["message"]["content"])
    items = reply["content"] if "content" in reply else reply["output"][0]["content"]
    return str(items[0]["text"])


# Fields.


@pytest.mark.parametrize("path", FORMS)
def test_null_field_is_treated_as_absent(server: ServerProcess, path: str) -> None:
    body = FORMS[path](TALK)
    status, reply = ask(server, path, {**dict.fromkeys(NULLS), **body})
    assert status == 200, reply
    assert reply_text(reply) == reply_text(ask(server, path, body)[1])


def test_text_completion_accepts_null_fields(server: ServerProcess) -> None:
    status, _ = ask(server, "/v1/completions", {**dict.fromkeys(NULLS), "prompt": "Hi."})
    assert status == 200


@pytest.mark.parametrize("path", [CHAT, "/chat/completions", "/v1/completions"])
def test_query_string_does_not_change_the_route(server: ServerProcess, path: str) -> None:
    body = {"messages": TALK, "prompt": "Hi.", "max_tokens": 2}
    assert ask(server, f"{path}?api-version=2024-10-21", body)[0] == 200


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"model": "m" * 300}, 404, "there is no model mmm"),
        ({"model": "org/" + "m" * 5000}, 404, "there is no model org/mmm"),
        ({"model": "half\ud800"}, 404, "there is no model half"),
        ({"model": "\0"}, 404, "there is no model"),
        ({"draft_model": "no/such-draft"}, 404, "there is no model no/such-draft"),
        ({"draft_model": "d" * 300}, 404, "there is no model ddd"),
        ({"draft_model": 5}, 400, "draft_model is 5, expected text"),
        ({"draft_model": ["d"]}, 400, "draft_model is a list, expected text"),
        ({"adapters": "no/such-adapter"}, 404, "there is no adapter no/such-adapter"),
        ({"adapters": "a" * 300}, 404, "there is no adapter aaa"),
    ],
)
def test_request_for_a_missing_model_keeps_the_loaded_model(
    server: ServerProcess, fields: dict[str, Any], status: int, message: str
) -> None:
    server.chat(TALK, max_tokens=2)
    n_loads = server.log.count("a token, keys ")
    assert n_loads
    actual, reply = ask(server, CHAT, {"messages": TALK, "max_tokens": 2, **fields})
    assert (actual, message in reply["error"]["message"]) == (status, True), reply
    assert len(reply["error"]["message"]) < 300
    assert server.chat(TALK, max_tokens=2).completion_tokens == 2
    assert server.log.count("a token, keys ") == n_loads


@pytest.mark.parametrize("path", FORMS)
def test_number_with_too_many_digits_gets_a_clear_error(server: ServerProcess, path: str) -> None:
    body = json.dumps(FORMS[path](TALK))[:-1] + ', "seed": ' + "9" * 5000 + "}"
    connection_status, reply = post(server, path, body.encode())
    assert connection_status == 400
    assert "the body is not valid JSON: Exceeds the limit" in reply["error"]["message"]


def post(server: ServerProcess, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


# Replies that continue a message.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_reply_continues_the_last_assistant_message(
    scripted_server: ScriptedServer, path: str, stream: bool
) -> None:
    """The first word keeps its leading space, and the next turn reuses the whole reply."""
    begun = [user(f"What is it? {path} {stream}"), answer("The answer is")]
    scripted_server.say(" forty two.")
    body = {**FORMS[path](begun), "max_tokens": 20, "stream": stream}
    if path == CHAT:
        body |= {"continue_final_message": True}
    if stream:
        events = [
            json.loads(data)
            for _, data in scripted_server.process.events(path, body)
            if data.startswith("{")
        ]
        parts = [
            event["choices"][0]["delta"].get("content") for event in events if event.get("choices")
        ]
        parts += [event["delta"].get("text") for event in events if "delta" in event]
        text = "".join(part or "" for part in parts)
    else:
        text = reply_text(ask(scripted_server.process, path, body)[1])
    assert text == " forty two."
    whole = [begun[0], answer("The answer is forty two."), user("Sure?")]
    scripted_server.say("Yes.")
    reply = scripted_server.process.chat(whole, max_tokens=20)
    n_new = len("<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n")
    assert reply.prompt_tokens - reply.cached_tokens < n_new


def test_assistant_message_with_a_trailing_space_is_refused(
    scripted_server: ScriptedServer,
) -> None:
    body = FORMS[MESSAGES]([user(), answer("The answer is ")])
    status, reply = ask(scripted_server.process, MESSAGES, body)
    says = "messages[1]: final assistant content cannot end with trailing whitespace"
    assert (status, says in reply["error"]["message"]) == (400, True), reply


# Conversations.


def test_conversation_with_adapted_messages_is_reused_at_each_turn(
    started: StartServer, models_dir: Path
) -> None:
    """Every turn reuses the whole earlier prompt, also after a restart."""
    model = make_tiny_model(models_dir / "mistral", chat_template=SHAPES["mistral"])
    server = started.with_plugin(model)
    talk: list[Message] = []
    before = 0
    for n in range(4):
        talk += HISTORIES["a user behind a result"][: 4 if n else 3]
        talk.append({"role": "system", "content": f"It is {n} o'clock."})
        reply = server.chat(talk, "long", max_tokens=8)
        assert reply.cached_tokens >= before - 1, n
        before = reply.prompt_tokens
        talk.append(answer(reply.text))
        if n == 2:
            server.restart()


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_every_history_is_served_over_every_api(
    start_server: StartServer, models_dir: Path, shape: str
) -> None:
    """If stock serves a history, its reply is the same."""
    model = make_tiny_model(models_dir / shape, chat_template=SHAPES[shape])
    starts = (
        lambda: start_server(model),
        lambda: start_server.with_plugin(model, *FULL_PRECISION),
    )
    with ThreadPoolExecutor(2) as pool:
        stock, ours = (future.result() for future in [pool.submit(start) for start in starts])
    n_same = 0
    long = {"arguments of many digits", "arguments nested deeply"}
    for name, history in HISTORIES.items():
        if name in long:
            continue  # thousands of tokens; tests without a server check their text
        for path, form in FORMS.items():
            status, reply = ask(ours, path, form(history))
            assert status == 200, (name, path, reply)
            if path != CHAT:
                continue
            try:
                expected, stock_reply = ask(stock, path, form(history))
            except HTTPException:  # such as a prompt without tokens
                expected, stock_reply = 0, {}
            hides_system = any(message["role"] == "system" for message in history[1:])
            if expected == 200 and not (shape == "harmony" and hides_system):
                assert reply_text(reply) == reply_text(stock_reply), name
                n_same += 1
            if not stock.healthy():
                stock.restart(kill=True)
    assert n_same >= 5
