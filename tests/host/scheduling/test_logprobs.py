"""Log-probabilities of replies: equal to mlx-lm's, and read before the next step."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.host.scheduling import logprobs
from mlx_lm_kvpersist.host.scheduling.logprobs import TokenLogprobs, set_logprobs

from .test_prefill import Counting, Serving, serve  # noqa: F401


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The steps of replies, as "step", and the values that are submitted, in order."""
    seen: list[Any] = []
    computed = Counting.__call__

    class Device:
        """Replaces `mx` in the module."""

        def __getattr__(self, name: str) -> Any:
            return getattr(mx, name)

        def async_eval(self, values: list[mx.array]) -> None:
            seen.extend(values)
            mx.async_eval(values)  # type: ignore[no-untyped-call]

    def step(model: Counting, ids: mx.array, cache: list[Any]) -> mx.array:
        if ids.shape[1] == 1:
            seen.append("step")
        return computed(model, ids, cache)

    monkeypatch.setattr(logprobs, "mx", Device())
    monkeypatch.setattr(Counting, "__call__", step)
    return seen


def test_logprob_of_each_token_is_submitted_before_the_next_step(
    serve: Callable[..., Serving],  # noqa: F811
    events: list[Any],
) -> None:
    """After the next step, the server would wait for that step to read the value."""
    serving = serve()
    clients = [serving.ask(1000 * n, 20, 12) for n in range(1, 4)]
    expected = float(Counting()(mx.array([[5]]), [Nothing()])[0, 0, 6]) - float(
        mx.logsumexp(Counting()(mx.array([[5]]), [Nothing()]))
    )
    n_read = 0
    while any(len(client.answer) < 12 for client in clients):
        events.clear()
        _, responses = serving.generator.next()
        submitted = events[: events.index("step")] if "step" in events else events
        for response in responses:
            serving.clients[response.uid].answer.append(response.token)
            value = response.logprobs[response.token]
            assert any(value is one for one in submitted)
            assert value.item() == pytest.approx(expected, abs=1e-5)
            n_read += 1
    assert n_read == 36


class Nothing:
    """A cache that keeps nothing."""

    offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> None:
        pass


def test_drafted_tokens_keep_their_own_log_probabilities() -> None:
    """A step with drafts has several responses of one reply; only the first token was due."""
    rows = mx.log(mx.array([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]]))
    responses = [
        SimpleNamespace(uid=3, token=token, logprobs=row)
        for token, row in zip((2, 0), rows, strict=True)
    ]
    set_logprobs(responses, {3: rows[0][2]})
    values = [response.logprobs[response.token].item() for response in responses]
    assert values == [rows[0, 2].item(), rows[1, 0].item()]


def test_other_requests_get_mlx_lms_array(serve: Callable[..., Serving]) -> None:  # noqa: F811
    serving = serve()
    client = serving.ask(1000, 20, is_taken=False)
    responses: list[Any] = []
    while not responses:
        _, responses = serving.generator.next()
    assert isinstance(responses[0].logprobs, mx.array)
    assert responses[0].token == client.ids[-1] + 1


def test_server_lists_the_most_likely_tokens_as_without_the_plugin(
    patched_server: ModuleType,
) -> None:
    row = mx.random.normal((300,), key=mx.random.key(1))
    token = int(mx.argmax(row))
    own = TokenLogprobs(row, token, row[token])
    assert own[token].item() == row[token].item() and own[3].item() == row[3].item()
    assert own.shape == (300,)

    class Tokenizer:
        def convert_ids_to_tokens(self, ids: Any) -> Any:
            return list(map(str, ids)) if isinstance(ids, list) else str(ids)

    listed = [patched_server._format_top_logprobs(each, 5, Tokenizer()) for each in (own, row)]
    assert listed[0] == listed[1] and len(listed[0]) == 5
