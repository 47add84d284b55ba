"""Requests that wait for a plugin's prefetch: which requests pass them, and which do not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.errors import ConfigError
from mlx_lm_kvpersist.host.hookspecs import hookimpl
from mlx_lm_kvpersist.host.probes import ARGS, GENERATION_ARGS
from mlx_lm_kvpersist.host.prompt import Prompt
from mlx_lm_kvpersist.host.response_generator import WORK_S
from tests.support.host import plugged

TOKENIZER = SimpleNamespace(has_chat_template=False, encode=lambda text: list(text.encode()))
SERVING = None
IDLE = 0.01


class Fetches:
    """Fetches for every prompt that begins with a "w", until the test says that it is there."""

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.begun: list[str] = []
        self.serving: list[bool] = []
        self.failing: BaseException | None = None

    @hookimpl
    def serving_changed(self, serving: bool) -> None:
        self.serving.append(serving)

    @hookimpl
    def prepare_messages(self, request: Any) -> None:
        request.n_prepared = getattr(request, "n_prepared", 0) + 1
        if "refuse" in request.prompt:
            raise ConfigError("refused")

    @hookimpl
    def prefetch(self, request: Any, prompt: Prompt) -> Callable[[], bool] | None:
        self.begun.append(request.prompt)
        if request.prompt == "raise":
            raise ValueError("bug")
        return self.is_there(request.prompt) if request.prompt.startswith("w") else None

    def is_there(self, prompt: str) -> Callable[[], bool]:
        def there() -> bool:
            if self.failing is not None:
                raise self.failing
            return prompt in self.there

        return there


@pytest.fixture
def fetches() -> Iterator[Fetches]:
    with plugged(made := Fetches()):
        yield made


@pytest.fixture
def generator(patched_server: ModuleType, fetches: Fetches, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The server's generator, whose thread has ended before it took a request."""
    monkeypatch.setattr(patched_server.ResponseGenerator, "_generate", lambda self: None)
    provider = SimpleNamespace(
        cli_args=ARGS, tokenizer=TOKENIZER, processor=None, is_batchable=True, max_context=40
    )
    made = patched_server.ResponseGenerator(provider, None)
    made.join()
    put(made, "first")
    assert take(made, IDLE) == "first"
    return made


def put(
    generator: Any, prompt: str, model: str = "model", seed: int | None = None, **request: Any
) -> Any:
    made = SimpleNamespace(request_type="text", prompt=prompt, messages=[], **request)
    args = {**vars(GENERATION_ARGS), "model": model, "seed": seed}
    generator.requests.put((None, made, SimpleNamespace(**args)))
    return made


def take(generator: Any, timeout: float | None = SERVING) -> str | None:
    """Take a request as the server's loop does, and tokenize it as that would."""
    queued = generator._next_request(timeout)
    if queued is None:
        return None
    _, request, args = queued
    ids, *_ = generator._tokenize(TOKENIZER, request, args)
    assert bytes(ids).decode() == request.prompt
    return str(request.prompt)


def test_ready_requests_pass_those_that_wait(generator: Any, fetches: Fetches) -> None:
    for prompt in ("w1", "a", "w2", "b"):
        put(generator, prompt)
    assert [take(generator) for _ in range(3)] == ["a", "b", None]
    fetches.there |= {"w2"}
    assert [take(generator) for _ in range(2)] == ["w2", None]
    fetches.there |= {"w1"}
    assert [take(generator) for _ in range(2)] == ["w1", None]
    assert fetches.begun == ["w1", "a", "w2", "b"]


def test_between_two_steps_one_that_waits_does_some_work(
    generator: Any, fetches: Fetches, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def there(prompt: str) -> Callable[[], bool]:
        def works() -> bool:
            asked.append(prompt)
            time.sleep(2 * WORK_S if prompt == "w2" else 0.0)
            return asked.count(prompt) > 3

        return works

    monkeypatch.setattr(fetches, "is_there", there)
    for prompt in ("w1", "w2", "w3"):
        put(generator, prompt)
    assert take(generator) is None
    asked.clear()
    assert not generator._is_asked() and asked == ["w1", "w2"]
    assert not generator._is_asked() and asked == ["w1", "w2", "w1", "w2"]


def test_with_nothing_to_serve_the_oldest_enters(generator: Any, fetches: Fetches) -> None:
    put(generator, "w1")
    put(generator, "w2")
    assert take(generator) is None
    put(generator, "c")
    assert [take(generator, IDLE) for _ in range(4)] == ["w1", "w2", "c", None]
    assert fetches.begun == ["w1", "w2"]


@pytest.mark.parametrize(
    "other",
    [
        {"model": "other"},
        {"seed": 7},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ],
)
def test_what_would_end_the_batch_passes_nobody(
    generator: Any, fetches: Fetches, other: dict[str, Any]
) -> None:
    put(generator, "w1")
    if "messages" in other:
        request = put(generator, "image")
        request.messages = other["messages"]
    else:
        put(generator, "image", **other)
    put(generator, "a")
    put(generator, "w3", "other")
    assert take(generator) is None
    # Neither does anybody pass that: it would wait for ever on a busy server.
    assert fetches.begun == ["w1"]
    fetches.there |= {"w1"}
    assert [take(generator) for _ in range(2)] == ["w1", "image"]


def test_a_waiting_request_is_tokenized_once(generator: Any, fetches: Fetches) -> None:
    request = put(generator, "w1")
    request.request_type, request.role_mapping = "chat", None
    request.tools, request.messages = None, [{"role": "user", "content": "x"}]
    assert generator._next_request() is None
    fetches.there |= {"w1"}
    queued = generator._next_request()
    generator._tokenize(TOKENIZER, request, queued[2])
    assert request.n_prepared == 1
    generator._tokenize(TOKENIZER, request, queued[2])
    assert request.n_prepared == 2


def test_a_model_that_was_loaded_meanwhile_tokenizes_itself(
    generator: Any, fetches: Fetches
) -> None:
    request = put(generator, "w1")
    assert generator._next_request() is None
    queued = generator._next_request(IDLE)
    other = SimpleNamespace(has_chat_template=False, encode=lambda text: [1, 2, 3])
    assert generator._tokenize(other, request, queued[2])[0] == [1, 2, 3]


def test_a_refused_request_is_handed_on_to_be_refused(generator: Any) -> None:
    request = put(generator, "refuse")
    request.request_type = "chat"
    queued = generator._next_request()
    with pytest.raises(ConfigError, match="refused"):
        generator._tokenize(TOKENIZER, request, queued[2])
    assert request.n_prepared == 1


def test_a_hook_that_fails_holds_nothing(
    generator: Any, fetches: Fetches, caplog: pytest.LogCaptureFixture
) -> None:
    put(generator, "raise")
    assert take(generator) == "raise"
    put(generator, "w1")
    assert take(generator) is None
    fetches.failing = ValueError("bug")
    assert take(generator) == "w1"
    assert "in hook prefetch" in caplog.text


@pytest.mark.parametrize("messages", [["hi"], [None], "hi", 5, [{"content": [None]}]])
def test_a4_a_malformed_request_is_its_clients_and_ends_no_thread(
    generator: Any, messages: Any
) -> None:
    """mlx-lm 0.31.3 and 0.32.0 queue what 0.32.2 refuses; nothing catches what is raised here."""
    request = put(generator, "a")
    request.request_type, request.messages = "chat", messages
    queued = generator._next_request()
    assert queued is not None and queued[1] is request
    with pytest.raises((AttributeError, TypeError, ValueError, KeyError)):
        generator._tokenize(
            SimpleNamespace(has_chat_template=False, encode=len), request, queued[2]
        )
    put(generator, "b")
    assert take(generator) == "b"


def test_a_prompt_that_is_too_long_is_refused_and_not_fetched(
    generator: Any, fetches: Fetches
) -> None:
    request = put(generator, "w" * 41)
    queued = generator._next_request()
    assert queued[1] is request and fetches.begun == []
    with pytest.raises(ValueError, match="41 tokens > 40 maximum"):
        generator._tokenize(TOKENIZER, request, queued[2])


def test_an_empty_prompt_is_still_refused(generator: Any) -> None:
    request = put(generator, "")
    queued = generator._next_request()
    with pytest.raises(ValueError, match="no tokens"):
        generator._tokenize(TOKENIZER, request, queued[2])


def test_a_batchs_time_ends_when_a_request_is_ready(generator: Any, fetches: Fetches) -> None:
    put(generator, "w1")
    assert take(generator) is None
    n_steps = 0
    for _ in generator._time_budget:
        n_steps += 1
        if n_steps == 3:
            fetches.there |= {"w1"}
    assert n_steps == 3
    assert take(generator) == "w1"


def test_plugins_know_when_requests_are_served(generator: Any, fetches: Fetches) -> None:
    take(generator)
    take(generator)
    take(generator, IDLE)
    take(generator, IDLE)
    put(generator, "a")
    take(generator, IDLE)
    assert fetches.serving == [True, False, True]


def test_without_a_plugin_that_fetches_stocks_queue_is_all(
    patched_server: ModuleType, generator: Any
) -> None:
    with plugged():
        put(generator, "w1")
        assert take(generator) == "w1"
        assert not generator._waiting
