"""A prompt waits only for the interrupted reply that it continues."""

from __future__ import annotations

from dataclasses import replace
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from mlx_lm_kvpersist.host.hooks import ClientRequest, Prompt, frozen
from mlx_lm_kvpersist.request.serving import INTERRUPTED_S, RequestState, Serving, Stage
from tests.store.conftest import ROOT

ASK, READ, NEXT = (
    {"role": role, "content": role + "!"} for role in ("user", "assistant", "system")
)


def client_request() -> ClientRequest:
    return ClientRequest(SimpleNamespace(request_type="chat", prompt="", messages=[]))


def prompt(*messages: dict[str, str]) -> Prompt:
    return Prompt([1], [[1]], ["user"], frozen(list(messages)))


@pytest.mark.parametrize(
    ("change", "messages", "waits"),
    [
        ({}, (ASK, READ, NEXT), True),
        ({}, (ASK, READ), True),
        ({}, (ASK,), False),
        ({}, (ASK, NEXT), False),
        ({}, (NEXT, READ, ASK), False),
        ({"client_gone": False}, (ASK, READ, NEXT), False),
        ({"is_saved": None}, (ASK, READ, NEXT), False),
        ({"stage": Stage.PREFILL}, (ASK, READ, NEXT), False),
        ({"root": replace(ROOT, namespace="another")}, (ASK, READ, NEXT), False),
    ],
)
def test_a_prompt_waits_for_the_interrupted_reply_that_it_continues(
    change: dict[str, Any], messages: tuple[dict[str, str], ...], waits: bool
) -> None:
    model: Any = SimpleNamespace(root=ROOT)
    serving = Serving(mock.Mock(), model, print, False, 0.1, mock.Mock())
    earlier = client_request()
    serving.await_interrupted(earlier, prompt(ASK))
    earlier.client_gone = change.get("client_gone", True)
    state, is_saved = RequestState.of(earlier), mock.Mock(Event, is_set=lambda: False)
    state.messages, state.root = prompt(ASK).messages, change.get("root", ROOT)
    state.is_saved = change.get("is_saved", is_saved)
    state.stage = change.get("stage", Stage.DECODE)
    serving.await_interrupted(client_request(), prompt(*messages))
    assert is_saved.wait.call_count == waits
    assert all(call.args[0] <= INTERRUPTED_S for call in is_saved.wait.mock_calls)
