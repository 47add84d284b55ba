"""Reading prompts from files, and warming sessions with them."""

from __future__ import annotations

import time
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.api.agents import Service, chat_body_of, read_prompt, warm
from mlx_lm_kvpersist.api.session_keys import session_key
from mlx_lm_kvpersist.errors import ConfigError, RequestRefused

ASK = {"role": "user", "content": "Who is first?"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("content", "roles"),
    [
        ([SYSTEM, ASK], ["system", "user"]),
        ({"messages": [ASK], "max_completion_tokens": 5, "stream": True}, ["user"]),
        ({"messages": [ASK], "tools": [{"type": "function"}], "model": "elsewhere"}, ["user"]),
        ({"messages": [ASK], "system": "Be brief."}, ["system", "user"]),
        ({"messages": [ASK], "tools": [{"name": "f", "input_schema": {}}]}, ["user"]),
        ({"input": "Who is first?", "instructions": "Be brief."}, ["system", "user"]),
        ({"messages": [ASK], "input": None, "system": None}, ["user"]),
        ({"input": "Who is first?", "messages": None}, ["user"]),
    ],
)
def test_prompt_can_be_messages_or_a_request_to_any_api(content: Any, roles: list[str]) -> None:
    body = chat_body_of(content, Message())
    assert [message["role"] for message in body["messages"]] == roles
    assert "Who is first?" in str(body["messages"])
    assert body["model"] == "default_model" and "max_completion_tokens" not in body
    assert ("tools" in body) is ("tools" in content)


@pytest.mark.parametrize("content", [5, {}, {"prompt": "x"}, None, "text"])
def test_other_prompt_contents_are_refused(content: Any) -> None:
    with pytest.raises(RequestRefused, match=r"the prompt is .*, expected messages"):
        chat_body_of(content, Message())


@pytest.mark.parametrize("content", ["{", None, "[" * 100_000])
def test_prompt_file_without_valid_json_is_refused(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"file\.json cannot be read as JSON"):
        read_prompt(file)


def warmed(refusal: str) -> Any:
    """Warm a session on a server that stores it, or does not store it because of `refusal`."""
    done: list[Any] = []
    handler = SimpleNamespace(headers=Message(), prefill=done.append)
    pin = SimpleNamespace(pin_newest=lambda *_: {"tokens": 7} if done else None)
    return warm(Service(lambda: pin, None, False, lambda: refusal), handler, "s", [ASK])


def test_warm_computes_and_pins_a_prompt() -> None:
    assert warmed("") == {"tokens": 7}


def test_warm_refuses_with_503_if_the_model_is_not_supported() -> None:
    with pytest.raises(RequestRefused, match="not supported: its caches are strange") as refused:
        warmed("its caches are strange")
    assert refused.value.status == 503


def test_warm_pins_a_session_with_a_long_name() -> None:
    handler: Any = SimpleNamespace(headers=Message(), prefill=lambda *_: None)
    pin = SimpleNamespace(pin_newest=lambda tenant, name, since_s: name)
    pinned = warm(Service(lambda: pin, None, False), handler, "n" * 300, [ASK])
    assert pinned == session_key(handler.headers, {})


def test_warm_waits_for_storing_across_a_system_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock moves by hours between two checks, and the prompt is stored afterwards."""
    now_s, answers = [1e9], iter([None, None, {"tokens": 7}])
    pin = SimpleNamespace(pin_newest=lambda *_: next(answers))

    def sleep(seconds: float) -> None:
        now_s[0] += 8 * 3600

    monkeypatch.setattr(time, "time", lambda: now_s[0])
    monkeypatch.setattr(time, "sleep", sleep)
    handler: Any = SimpleNamespace(headers=Message(), prefill=lambda *_: None)
    assert warm(Service(lambda: pin, None, False), handler, "s", [ASK]) == {"tokens": 7}
