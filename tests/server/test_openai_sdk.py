"""The openai SDK against a real server, as in a plain client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.support import StartServer, synthetic_text
from tests.support.scripted import ScriptedServer

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look somewhere.",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    },
}


def test_conversation_through_the_sdk_is_reused_and_streamed(
    start_server: StartServer, tiny_model: Path
) -> None:
    server = start_server.with_plugin(tiny_model)
    client = OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": synthetic_text(300)},
        {"role": "user", "content": "Where is it?"},
    ]
    before = 0
    for turn in range(3):
        raw = client.chat.completions.with_raw_response.create(
            model="default_model",
            messages=messages,
            max_tokens=20,
            tools=[TOOL],
        )
        reply = raw.parse()
        assert raw.headers["x-kvpersist"].startswith(
            "outcome=EXTEND; tier=ram" if turn else "outcome=MISS; tier=cold"
        )
        assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
        assert reply.usage.prompt_tokens_details.cached_tokens == before
        before = reply.usage.total_tokens
        messages += [
            {"role": "assistant", "content": reply.choices[0].message.content},
            {"role": "user", "content": f"And then, {turn}?"},
        ]
    stream = client.chat.completions.create(
        model="default_model",
        messages=messages,
        max_tokens=20,
        tools=[TOOL],
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"X-Session-ID": "sdk"},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    usage = chunks[-1].usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == before
    client.close()


def test_reasoning_is_sent_and_accepted_under_both_names(
    scripted_server: ScriptedServer,
) -> None:
    """opencode, Cline and others read `reasoning_content`, which is DeepSeek's name."""
    client = OpenAI(base_url=f"{scripted_server.url}/v1", api_key="none", max_retries=0)
    asked: Any = [{"role": "user", "content": "What do you think?"}]
    given: Any = {"model": "default_model", "max_tokens": 60}
    script = "<think>\nHm, ships.\n</think>\n\nShips."
    scripted_server.say(script, script, "Yes.", "Yes.")
    reply = client.chat.completions.create(messages=asked, **given)
    message = reply.choices[0].message.to_dict()
    assert message["reasoning"] == message["reasoning_content"] == "\nHm, ships.\n"
    with client.chat.completions.create(messages=asked, stream=True, **given) as stream:
        deltas = [chunk.choices[0].delta.to_dict() for chunk in stream]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(str(delta.get(name) or "") for delta in deltas) == "\nHm, ships.\n"
    assert reply.usage is not None
    for name in ("reasoning", "reasoning_content"):
        returned = {"role": "assistant", "content": message["content"], name: message[name]}
        talk = [*asked, returned, {"role": "user", "content": f"Sure, {name}?"}]
        again = client.chat.completions.create(messages=talk, **given)
        assert again.usage is not None and again.usage.prompt_tokens_details is not None
        assert again.usage.prompt_tokens_details.cached_tokens >= reply.usage.total_tokens
    client.close()
