"""Conversations as clients resend them; many are refused by at least one template.

Each is a list of messages of Chat Completions. The model must see the texts in angle brackets.
"""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]

UUID = "7b5c1b1e-4a53-4c4d-9a57-3d2f0f2f9a10"
CLAUDE = "toolu_01A09q90qw90lq917835lq9"


def user(content: Any = "<u1>") -> Message:
    return {"role": "user", "content": content}


def answer(content: Any = "<a1>", **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


def system(content: Any = "<s1>") -> Message:
    return {"role": "system", "content": content}


def call(arguments: Any = '{"where": "<c1>"}', call_id: Any = CLAUDE, name: str = "look") -> Any:
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made if call_id is None else {"id": call_id, **made}


def calls(*made: Any, content: Any = "", **fields: Any) -> Message:
    return {
        "role": "assistant", "content": content, "tool_calls": list(made or [call()]), **fields
    }  # fmt: skip


def result(content: Any = "<r1>", call_id: Any = CLAUDE, **fields: Any) -> Message:
    made = {"role": "tool", "content": content, **fields}
    return made if call_id is None else {"tool_call_id": call_id, **made}


def with_call(made: Any, call_id: Any = CLAUDE) -> list[Message]:
    return [user(), calls(made), result(call_id=call_id), answer(), user("<u2>")]


TWO = call('{"where": "<c1>"}', "x1"), call('{"where": "<c2>"}', "x2", "peek")
HISTORIES: dict[str, list[Message]] = {
    "a chat": [system(), user(), answer(), user("<u2>")],
    "a question": [user()],
    # Ids.
    "Claude's id": with_call(call()),
    "the server's id": with_call(call(call_id=UUID), UUID),
    "an id of nine": with_call(call(call_id="abcDEF123"), "abcDEF123"),
    "an id of one letter": with_call(call(call_id="1"), "1"),
    "an empty id": with_call(call(call_id=""), ""),
    "no id": with_call(call(call_id=None), None),
    "an id that is a number": with_call(call(call_id=5), 5),
    "the same id in two turns": [*with_call(call()), calls(call('{"where": "<c2>"}')),
                                 result("<r2>"), answer("<a2>"), user("<u3>")],
    # Arguments.
    "empty arguments": with_call(call("")),
    "cut arguments": with_call(call('{"path": "<c1>')),
    "arguments of an empty object": with_call(call("{}")),
    "arguments in a list": with_call(call('["<c1>"]')),
    "arguments of a number": with_call(call("17")),
    "arguments of a text": with_call(call('"<c1>"')),
    "arguments in words": with_call(call("look at <c1>")),
    "arguments of null": with_call(call("null")),
    "null arguments": with_call(call(None)),
    "no arguments": with_call({"id": CLAUDE, "type": "function", "function": {"name": "look"}}),
    "arguments of many digits": with_call(call('{"n": ' + "9" * 5000 + "}")),
    "arguments nested deeply": with_call(call("[" * 2000)),
    # Halves of surrogate pairs.
    "half a pair in content": [user("<u1>\ud83d"), answer("\udc00<a1>"), user("<u2>")],
    "half a pair in arguments": with_call(call('{"where": "<c1>\\ud83d"}')),
    "half a pair in cut arguments": with_call(call('{"where": "<c1>\ud83d')),
    "half a pair in a name": with_call(call(name="look\ud83d")),
    "half a pair in an id": with_call(call(call_id="a\ud83d"), "a\ud83d"),
    "half a pair in a result": [user(), calls(), result("<r1>\udc00"), answer(), user("<u2>")],
    "half a pair in reasoning": [user(), answer(reasoning="\ud83d"), user("<u2>")],
    "half a pair in parts": [user([{"type": "text", "text": "<u1>\ud83d"}])],
    # Roles.
    "two users": [user(), user("<u2>"), answer(), user("<u3>")],
    "three users": [user(), user("<u2>"), user("<u3>")],
    "two answers": [user(), answer(), answer("<a2>"), user("<u2>")],
    "an answer first": [answer(), user()],
    "an answer behind the system": [system(), answer(), user()],
    "an answer last": [user(), answer()],
    "a system alone": [system()],
    "an answer alone": [answer()],
    "a user behind a result": [user(), calls(), result(), user("<u2>"), answer(), user("<u3>")],
    "a user behind a result, last": [user(), calls(), result(), user("<u2>")],
    "a system behind a result": [user(), calls(), result(), system("<s2>"), answer(), user("<u2>")],
    "a system behind a user": [user(), system(), answer(), user("<u2>"), system("<s2>")],
    "a system behind an answer": [user(), answer(), system(), user("<u2>")],
    "two systems": [system(), system("<s2>"), user()],
    "no user": [system(), calls(), result()],
    "a function's result": [user(), {"role": "function", "name": "look", "content": "<r1>"},
                            answer(), user("<u2>")],
    # Calls and results.
    "content beside a call": [user(), calls(content="<t1>"), result(), answer(), user("<u2>")],
    "a result first": [result(), user()],
    "a result without a call": [user(), answer(), result(), user("<u2>")],
    "a result of another turn": [user(), calls(), result(), answer(), user("<u2>"), result("<r2>")],
    "a call without a result": [user(), calls(), user("<u2>")],
    "a call and an answer": [user(), calls(), answer(), user("<u2>")],
    "a call last": [user(), calls()],
    "two calls": [user(), calls(*TWO), result("<r1>", "x1"), result("<r2>", "x2"), answer(),
                  user("<u2>")],
    "two calls, results reversed": [user(), calls(*TWO), result("<r2>", "x2"),
                                    result("<r1>", "x1"), answer(), user("<u2>")],
    "two calls, one result": [user(), calls(*TWO), result("<r1>", "x1"), user("<u2>")],
    "two calls without results": [user(), calls(*TWO), user("<u2>")],
    "two calls in two messages": [user(), calls(TWO[0]), calls(TWO[1]), result("<r1>", "x1"),
                                  result("<r2>", "x2"), answer(), user("<u2>")],
    "four steps": [user(), *(m for i in range(4) for m in (calls(call(call_id=f"i{i}")),
                                                           result(f"<r{i}>", f"i{i}"))),
                   answer(), user("<u2>")],
    "thoughts beside a call": [user(), calls(content="<t1>", reasoning="<h1>"), result(), answer(),
                               user("<u2>")],
    "a system between a call and its result": [user(), calls(), system(), result(), answer(),
                                               user("<u2>")],
    "a user between a call and its result": [user(), calls(), user("<u2>"), result(), answer(),
                                             user("<u3>")],
    "a system between two results": [user(), calls(*TWO), result("<r1>", "x1"), system(),
                                     result("<r2>", "x2"), answer(), user("<u2>")],
    "a system and a user behind two results": [user(), calls(*TWO), result("<r1>", "x1"),
                                               result("<r2>", "x2"), system(), user("<u2>"),
                                               answer(), user("<u3>")],
    "an answer and a call": [user(), answer(), calls(), result(), answer("<a2>"), user("<u2>")],
    "two results of a call": [user(), calls(), result(), result("<r2>"), answer(), user("<u2>")],
    "two results of one of two calls": [user(), calls(*TWO), result("<r1>", "x1"),
                                        result("<r2>", "x1"), result("<r3>", "x2"), answer(),
                                        user("<u2>")],
    "two calls with one id": [user(), calls(call(), call('{"where": "<c2>"}')), result(),
                              result("<r2>"), answer(), user("<u2>")],
    "a result with another id": [user(), calls(), result(call_id="x1"), answer(), user("<u2>")],
    "a result with another id, interrupted": [user(), calls(*TWO), result(), user("<u2>")],
    "two equal calls": [user(), calls(call(), call()), result(), result("<r2>"), answer(),
                        user("<u2>")],
    "two results first": [result("<r1>", "x1"), result("<r2>", "x2"), user()],
    "a call first": [calls(), result(), user()],
    "unreadable calls behind a reminder": [
        user(), calls(), result(), system(), user("<u2>"),
        calls(call('{"path": "<c2>', "a"), call(None, "b", "peek"), call("[1", "c")),
        system("<s2>"), *(result(f"<r{i}>", call_id) for i, call_id in enumerate("bac", 2)),
        answer(), user("<u3>")],
    # Nulls and parts.
    "null fields": [user(), answer(name=None, tool_calls=None, refusal=None), user("<u2>")],
    "null content": [user(), calls(content=None), result(), answer(None), user("<u2>")],
    "no calls": [user(), answer(tool_calls=[]), user("<u2>")],
    "calls in an object": [user(), answer(tool_calls={}), user("<u2>")],
    "empty contents": [user(""), answer(""), calls(content=""), result(""), answer(""), user("")],
    "content in parts": [user([{"type": "text", "text": "<u1>"}, {"type": "text", "text": "!"}])],
    "no parts": [user([]), answer(), user("<u2>")],
    "a refusal": [user(), answer([{"type": "refusal", "refusal": "<a1>"}]), user("<u2>")],
    "a part of an unknown type": [user(), answer([{"type": "hologram"}]), user("<u2>")],
    "a part of an unknown type with text": [user(), answer([{"type": "output_text",
                                            "text": "<a1>"}]), user("<u2>")],
    "a text of null": [user([{"type": "text", "text": None}, {"type": "text", "text": "<u1>"}])],
}  # fmt: skip


def as_messages(history: list[Message]) -> dict[str, Any]:
    return {"max_tokens": 4, "messages": [_as_message(message) for message in history]}


def _as_message(message: Message) -> Message:
    role, content = message["role"], message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if role in ("tool", "function"):
        call_id = message.get("tool_call_id", message.get("name"))
        found = {"type": "tool_result", "tool_use_id": str(call_id), "content": content}
        return {"role": "user", "content": [found]}
    if message.get("reasoning"):
        blocks = [{"type": "thinking", "thinking": message["reasoning"]}, *blocks]
    for made in message.get("tool_calls") or ():
        function = made["function"]
        given = _parsed(function.get("arguments"))
        use = {"type": "tool_use", "id": str(made.get("id")), "name": function["name"]}
        blocks = [*blocks, {**use, "input": given}]
    return {"role": role, "content": blocks}


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, TypeError, RecursionError):
        return arguments


def as_responses(history: list[Message]) -> dict[str, Any]:
    items: list[Message] = []
    for message in history:
        role, content = message["role"], message["content"]
        if role in ("tool", "function"):
            call_id = str(message.get("tool_call_id", message.get("name")))
            items.append({"type": "function_call_output", "call_id": call_id, "output": content})
            continue
        if message.get("reasoning"):
            thoughts = [{"type": "reasoning_text", "text": message["reasoning"]}]
            items.append({"type": "reasoning", "content": thoughts})
        if content or role != "assistant":
            items.append({"type": "message", "role": role, "content": content})
        for made in message.get("tool_calls") or ():
            function = made["function"]
            item = {"type": "function_call", "call_id": str(made.get("id"))}
            given = {"name": function["name"], "arguments": function.get("arguments")}
            items.append({**item, **given})
    return {"max_output_tokens": 4, "input": items}
