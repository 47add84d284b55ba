"""The openai SDK against a real server: what a plain client sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.support import StartServer, synthetic_text

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look somewhere.",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    },
}


def test_a_conversation(start_server: StartServer, tiny_model: Path) -> None:
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
            "outcome=EXTEND; tier=hot" if turn else "outcome=MISS; tier=cold"
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
