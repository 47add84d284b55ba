"""The Messages API translated to chat completions and back, without a server."""

from __future__ import annotations

import json
from email.message import Message as Headers
from typing import Any

import pytest
from hypothesis import given

from mlx_lm_kvpersist.api.messages import MessagesAPI, MessagesReply
from mlx_lm_kvpersist.errors import RequestRefused
from mlx_lm_kvpersist.host.attachments import fit_attachments

from .bodies import DELTAS, MESSAGES, SCHEMA, USAGE, Delta, call, mutated


def chat(**changes: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **changes}
    return MessagesAPI().parse(body, Headers()).fields


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def test_request_becomes_a_chat_completion_request() -> None:
    request = MessagesAPI().parse(MESSAGES, Headers())
    look = {"type": "function", "function": {"name": "look", "description": "Look."}}
    look["function"] |= {"parameters": SCHEMA}  # type: ignore[operator]
    later = {"type": "function", "function": {"name": "later", "parameters": SCHEMA}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ=="}}
    arguments = '{"where": "hä", "n": 1}'
    assert request.tools == [look, later]
    assert request.fields == {
        "model": "claude-x",
        "max_tokens": 100,
        "stop": ["end"],
        "temperature": 0.5,
        "chat_template_kwargs": {"enable_thinking": False},
        "tools": [look],
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
            {"role": "user", "content": "Hi."},
            {
                "role": "assistant",
                "content": "One two",
                "reasoning": "Hm.",
                "tool_calls": [
                    {
                        "id": "1",
                        "type": "function",
                        "function": {"name": "look", "arguments": arguments},
                    }
                ],
            },
            {
                "role": "tool",
                "tool_call_id": "1",
                "content": [
                    {"type": "text", "text": "There."},
                    {"type": "text", "text": f"<tool>{json.dumps(later)}</tool>\n"},
                    image,
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "And"},
                    {"type": "text", "text": " this"},
                    {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
                ],
            },
            {"role": "system", "content": "Be brief."},
        ],
    }


@pytest.mark.parametrize(
    ("requested", "sent"), [(0, 1), (-3, 1), (128_000, 128_000), (10**15, 2**31 - 1)]
)
def test_max_tokens_is_clamped(requested: int, sent: int) -> None:
    assert chat(max_tokens=requested)["max_tokens"] == sent


def test_fields_unknown_to_chat_completions_are_dropped() -> None:
    more = {"context_management": {}, "output_config": {}, "thinking": {"type": "adaptive"}}
    assert chat(tool_choice={"type": "any"}, service_tier="auto", **more) == chat()


@pytest.mark.parametrize(
    ("block", "name"),
    [
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "image"),
        (
            {
                "type": "document",
                "source": {"type": "base64", "media_type": "application/pdf", "data": "QQ=="},
            },
            "application/pdf",
        ),
        ({"type": "document", "source": {"type": "url", "url": "https://a/b.pdf"}}, "document"),
        ({"type": "document"}, "document"),
        (
            {
                "type": "document",
                "source": {"type": "content", "content": [{"type": "document"}]},
            },
            "document",
        ),
        ({"type": "container_upload"}, "container_upload"),
    ],
)
def test_unreadable_block_is_named_in_a_refusal_or_a_line(block: dict[str, Any], name: str) -> None:
    for reads_images in (False, True):
        with pytest.raises(RequestRefused, match=f"has {name}, expected text"):
            fit_attachments(chat(messages=[user(block)])["messages"], reads_images)
        later = chat(messages=[user(block), {"role": "assistant", "content": "A"}, user()])
        (line,) = fit_attachments(later["messages"], reads_images)[0]["content"]
        assert line["text"].startswith(f"[{name}, not shown: ")


def test_tool_result_without_a_call_id_is_refused() -> None:
    with pytest.raises(RequestRefused, match=r"content\[0\].tool_use_id is null, expected text"):
        chat(messages=[user({"type": "tool_result"})])


@pytest.mark.parametrize("content", ["", [], None])
def test_user_message_without_content_is_kept(content: Any) -> None:
    kept = chat(messages=[{"role": "user", "content": content}])["messages"][-1]
    assert (kept["role"], kept["content"] or "") == ("user", "")


def test_empty_list_of_messages_is_refused() -> None:
    with pytest.raises(RequestRefused, match=r"^messages is a list, expected at least one"):
        chat(messages=[])


def test_error_names_the_first_of_two_faults() -> None:
    with pytest.raises(RequestRefused, match=r"^messages\[0\].role is null"):
        chat(messages=[{"content": "a"}, "b"])
    with pytest.raises(RequestRefused, match=r"^messages\[0\].content\[0\].text is 5"):
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": 5}, "b"]}])


FOREIGN_BLOCKS: list[dict[str, Any]] = [
    {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "sea"}},
    {
        "type": "web_search_tool_result",
        "tool_use_id": "s1",
        "content": [
            {
                "type": "web_search_result",
                "title": "The sea",
                "url": "https://sea.example",
                "encrypted_content": "x",
            }
        ],
    },
    {"type": "text", "text": "It is wide.", "citations": [{"cited_text": "wide"}]},
    {"type": "thinking", "thinking": None, "signature": None},
    {"type": "redacted_thinking", "data": "x"},
    {"type": "text", "text": None},
    {"type": "tool_use", "id": "1", "name": "look", "input": None},
]


def test_assistant_blocks_of_other_servers_are_accepted() -> None:
    """Text is kept; parts without text are left out."""
    given = [
        {"role": "user", "content": "How wide?"},
        {"role": "assistant", "content": FOREIGN_BLOCKS},
    ]
    message = chat(messages=given)["messages"][1]
    assert message["content"] == "The sea\nhttps://sea.exampleIt is wide."
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": "{}"}
    assert message["reasoning"] == ""
    empty: tuple[Any, ...] = (None, [], "")
    for content in empty:
        given[1] = {"role": "assistant", "content": content}
        assert chat(messages=given)["messages"][1] == {"role": "assistant", "content": ""}


SEARCH_RESULT: dict[str, Any] = {
    "type": "search_result",
    "source": "https://sea.example",
    "title": "The sea",
    "content": [{"type": "text", "text": "It is wide."}],
    "citations": {"enabled": True},
}
DOCUMENT: dict[str, Any] = {
    "type": "document",
    "title": "Waves",
    "context": "A paper.",
    "source": {"type": "content", "content": [{"type": "text", "text": "They rise."}]},
}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}


def test_documents_and_search_results_become_text() -> None:
    content = [
        SEARCH_RESULT,
        DOCUMENT,
        {"type": "document", "source": {"type": "content", "content": "S."}},
    ]
    (message,) = chat(messages=[{"role": "user", "content": content}])["messages"]
    assert [part["text"] for part in message["content"]] == [
        "The sea\nhttps://sea.example\nIt is wide.",
        *("Waves\n", "A paper.\n", "They rise."),
        "S.",
    ]


def test_unreadable_content_of_a_tool_result_is_not_refused() -> None:
    """Clients send the result again with every turn, even if its tool was removed since."""
    gone = {"type": "tool_reference", "tool_name": "gone"}
    content = [gone, SEARCH_RESULT, PDF, {"type": "hologram"}, {"type": "text", "text": "There."}]
    result = {"type": "tool_result", "tool_use_id": "1", "content": content}
    (message,) = fit_attachments(chat(messages=[user(result)])["messages"], False)
    assert [part["text"] for part in message["content"]] == [
        "The sea\nhttps://sea.example\nIt is wide.",
        "\n[application/pdf, not shown: this model reads text only]\n",
        "\n[hologram, not shown: this model reads text only]\n",
        "There.",
    ]


def test_only_tool_choice_none_is_passed_on() -> None:
    assert chat(tool_choice={"type": "none"})["tool_choice"] == "none"
    for choice in ({"type": "auto"}, {"type": "tool", "name": "look"}, None, "none"):
        assert "tool_choice" not in chat(tool_choice=choice)


@given(mutated(MESSAGES))
def test_mutated_body_is_parsed_or_refused_with_an_explanation(body: dict[str, Any]) -> None:
    try:
        request = MessagesAPI().parse(body, Headers())
    except RequestRefused as error:
        assert "expected" in str(error) or "not valid Unicode" in str(error)
    else:
        assert isinstance(request.fields["messages"], list)


@given(DELTAS)
def test_stream_events_add_up_to_the_whole_reply(deltas: list[Delta]) -> None:
    reply = MessagesReply("m", marks_cache=True)
    events = reply.begin(10, 7)
    for delta in deltas:
        events += reply.add(*delta)
    events += reply.end("stop", None, USAGE)
    message = events[0]["message"]
    is_open = False
    assert events[1] == {"type": "ping"}
    for event in events[2:-2]:
        content = message["content"]
        kind = event["type"]
        assert event["index"] == len(content) - (kind != "content_block_start")
        assert is_open == (kind != "content_block_start")
        is_open = kind != "content_block_stop"
        if kind == "content_block_start":
            content.append(dict(event["content_block"]))
        elif kind == "content_block_delta":
            form, *_ = set(event["delta"]) - {"type"}
            if form == "partial_json":
                content[-1]["input"] = json.loads(event["delta"][form])
            elif form == "signature":
                content[-1]["signature"] = event["delta"][form]
            else:
                content[-1][form] += event["delta"][form]
    assert not is_open
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    whole = {**message, **events[-2]["delta"], "usage": events[-2]["usage"]}
    assert whole == reply.whole()
    assert all(block.get("text", "x").strip() for block in whole["content"])
    assert reply.content == "".join(block.get("text", "") for block in whole["content"])
    spoken = "".join(text for text, _, _ in deltas)
    assert "".join(reply.content.split()) == "".join(spoken.split())


@pytest.mark.parametrize(
    ("finish", "word", "calls", "reason"),
    [
        ("stop", None, False, "end_turn"),
        ("length", None, False, "max_tokens"),
        ("stop", "end", False, "stop_sequence"),
        ("tool_calls", None, True, "tool_use"),
        ("tool_calls", None, False, "end_turn"),
        ("length", None, True, "max_tokens"),
    ],
)
def test_finish_reason_becomes_a_stop_reason(
    finish: str, word: str | None, calls: bool, reason: str
) -> None:
    reply = MessagesReply("m", marks_cache=False)
    reply.add("x", "", [call("f", {})] if calls else [])
    *_, delta, _ = reply.end(finish, word, USAGE)
    assert delta["delta"]["stop_reason"] == reason
    assert delta["delta"]["stop_sequence"] == (word if reason == "stop_sequence" else None)


@pytest.mark.parametrize("marks_cache", [True, False])
def test_input_token_counts_add_up_to_the_prompt(marks_cache: bool) -> None:
    reply = MessagesReply("m", marks_cache=marks_cache)
    usage = reply.end("stop", None, USAGE)[-2]["usage"]
    assert usage["cache_read_input_tokens"] == 7 and usage["output_tokens"] == 5
    assert usage["cache_creation_input_tokens"] == (3 if marks_cache else 0)
    assert usage["input_tokens"] == (0 if marks_cache else 3)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"a": 1}, {"a": 1}),
        (None, {}),
        ('{"a": 1}', {"a": 1}),
        ([1], {"arguments": [1]}),
        ({"a": float("nan"), "b": [float("-inf")]}, {"a": "NaN", "b": ["-Infinity"]}),
        ('{"a": NaN}', {"a": "NaN"}),
    ],
)
def test_tool_arguments_always_become_an_object(arguments: Any, shown: dict[str, Any]) -> None:
    reply = MessagesReply("m", marks_cache=False)
    reply.add("", "", [call("f", arguments)])
    reply.end("tool_calls", None, USAGE)
    assert reply.whole()["content"][0]["input"] == shown


def test_call_whose_id_is_a_number_can_be_sent_back() -> None:
    """Some models write an id, and mlx-lm's parser keeps it."""
    reply = MessagesReply("m", marks_cache=False)
    reply.add("", "", [{**call("f", {}), "id": 5}])
    reply.end("tool_calls", None, USAGE)
    sent_back = {"role": "assistant", "content": reply.whole()["content"]}
    assert chat(messages=[sent_back])["messages"][0]["tool_calls"][0]["id"] == "5"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "not_found_error"),
        (411, "invalid_request_error"),
        (413, "request_too_large"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_error_type_follows_from_the_status(status: int, kind: str) -> None:
    error = MessagesAPI().error(status, "Why.", None)
    assert error == {"type": "error", "error": {"type": kind, "message": "Why."}}
    assert MessagesReply("m", marks_cache=False).fail(status, "Why.", None) == [error]


@pytest.mark.parametrize(
    ("first", "second", "n_messages"),
    [
        (["text"], ["text"], 1),
        (["text"], ["text", "a"], 1),
        (["a"], ["b"], 1),
        (["text", "a"], ["b", "c"], 1),
        (["a"], ["text"], 2),
        (["a"], ["text", "b"], 2),
    ],
)
def test_consecutive_assistant_messages_are_joined_in_order(
    first: list[str], second: list[str], n_messages: int
) -> None:
    def block(name: str) -> dict[str, Any]:
        if name == "text":
            return {"type": "text", "text": "Hm."}
        return {"type": "tool_use", "id": name, "name": "look", "input": {}}

    sent = [
        {"role": "assistant", "content": [block(name) for name in names]}
        for names in (first, second)
    ]
    user = {"role": "user", "content": "Go."}
    talk = chat(messages=[user, *sent, user])["messages"][1:-1]
    assert len(talk) == n_messages
    ids = [call["id"] for message in talk for call in message.get("tool_calls", ())]
    assert ids == [name for name in (*first, *second) if name != "text"]
    texts = "\n\n".join(message["content"] for message in talk).strip("\n")
    assert texts == "\n\n".join(["Hm."] * [*first, *second].count("text"))
