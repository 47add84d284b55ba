"""Tokenizing between two hooks: what may change a prompt, and what a failure costs."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.errors import ClientGone, ConfigError, RequestRefused
from mlx_lm_kvpersist.host.hookspecs import hookimpl
from mlx_lm_kvpersist.host.probes import ARGS, GENERATION_ARGS
from mlx_lm_kvpersist.host.prompt import Prepared, Prompt, TakenTokens
from mlx_lm_kvpersist.host.reply import OpenRequests
from mlx_lm_kvpersist.host.response_generator import PluginResponseGenerator
from tests.support.host import plugged

TOKENIZER = SimpleNamespace(has_chat_template=False, encode=lambda text: list(text.encode()))


class Prepares:
    """Prepares as the test says."""

    def __init__(self, prompt: Any = None, messages: Any = None) -> None:
        self.prompt, self.messages = prompt, messages
        self.n_messages = 0
        self.given: tuple[Any, ...] = ()

    @hookimpl
    def prepare_messages(self, request: Any, args: Any, tokenizer: Any) -> None:
        self.n_messages += 1
        if isinstance(self.messages, Exception):
            raise self.messages

    @hookimpl
    def take_request(self, request: Any, args: Any, tokenizer: Any, prompt: Prompt) -> Any:
        self.given = request, args, tokenizer
        if isinstance(self.prompt, Exception):
            raise self.prompt
        return Prepared(self.prompt) if isinstance(self.prompt, Prompt) else self.prompt


def tokenize(
    server: ModuleType, text: str = "abc", kind: str = "text", max_context: int | None = None
) -> Any:
    """Tokenize a request with the server's own code, as its generation thread does."""
    generator = object.__new__(server.ResponseGenerator)
    generator.model_provider = SimpleNamespace(
        cli_args=ARGS, processor=None, max_context=max_context
    )
    messages = [{"role": "user", "content": text}] if kind == "chat" else []
    request = server.CompletionRequest(kind, text, messages, None, None)
    return request, generator._tokenize(TOKENIZER, request, GENERATION_ARGS)


def test_ids_and_their_slices_know_who_took_them(patched_server: ModuleType) -> None:
    prompt = Prompt([97, 98, 99], [[97, 98, 99]], ["assistant"])
    prepared = Prepared(prompt, handle="handle")
    with plugged(plugin := Prepares(prepared)):
        request, (ids, segments, types, *_) = tokenize(patched_server)
    assert plugin.given == (request, GENERATION_ARGS, TOKENIZER)
    assert (ids, segments, types) == ([97, 98, 99], [[97, 98, 99]], ["assistant"])
    key = ids[:2]
    key += [1, 2]  # as the batch generator does
    key.append(3)
    assert key == [97, 98, 1, 2, 3] and key[-1] == 3
    assert isinstance(key, TakenTokens) and key[:].taken is prepared
    assert prepared.plugin is plugin


def test_what_no_plugin_takes_is_stocks(patched_server: ModuleType) -> None:
    with plugged(Prepares()):
        _, (ids, *_) = tokenize(patched_server)
    assert type(ids) is list and ids == [97, 98, 99]


def test_a6_a_plugin_that_fails_or_answers_nonsense_leaves_the_request_to_the_next(
    patched_server: ModuleType,
) -> None:
    prompt = Prompt([7], [[7]], ["user"])
    for first in (ValueError("bug"), Prompt([], [], []), "nonsense"):
        with plugged(Prepares(first), second := Prepares(prompt)):
            _, (ids, *_) = tokenize(patched_server)
        assert ids == [7] and ids.taken.plugin is second


def test_a_client_that_left_is_no_failure_of_the_plugin_that_noticed(
    patched_server: ModuleType,
) -> None:
    with plugged(Prepares(ClientGone()), Prepares(Prompt([7], [[7]], ["user"]))):
        with pytest.raises(ClientGone):
            tokenize(patched_server)


def test_messages_are_prepared_for_chats_only(patched_server: ModuleType) -> None:
    with plugged(prepares := Prepares()):
        tokenize(patched_server, kind="text")
        assert prepares.n_messages == 0
        tokenize(patched_server, kind="chat")
        assert prepares.n_messages == 1


def test_a_refused_message_reaches_the_client(patched_server: ModuleType) -> None:
    with (
        plugged(Prepares(messages=ConfigError("no such agent"))),
        pytest.raises(ConfigError, match="no such agent"),
    ):
        tokenize(patched_server, kind="chat")


def test_a_new_prompt_is_fed_and_stock_pops_from_copies(patched_server: ModuleType) -> None:
    prompt = Prompt([7, 8, 9], [[7], [8, 9]], ["user", "assistant"])
    with plugged(Prepares(prompt)):
        _, (ids, segments, types, *_) = tokenize(patched_server)
    segments.pop(0)
    types.pop(0)
    assert ids == [7, 8, 9]
    assert prompt == Prompt([7, 8, 9], [[7], [8, 9]], ["user", "assistant"])


@pytest.mark.parametrize(
    "answer",
    [
        ValueError("bug"),
        Prompt([1, 2], [[1], [3]], ["user", "assistant"]),
        Prompt([1, 2], [[1, 2], []], ["user", "assistant"]),
        Prompt([1, 2], [[1, 2]], []),
        Prompt([], [], []),
        Prepared(Prompt([1, 2], [[1, 2]], ["user"]), ["caches"], 2),
        Prepared(Prompt([1, 2], [[1, 2]], ["user"]), None, 1),
        Prepared(Prompt([1, 2], [[1, 2]], ["user"]), ["caches"], 0),
        "no Prepared",
    ],
)
def test_a_wrong_prompt_costs_speed_only(
    patched_server: ModuleType, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with plugged(Prepares(answer)):
        _, (ids, *_) = tokenize(patched_server)
    assert ids == [97, 98, 99]
    assert "hook take_request" in caplog.text


def test_an_empty_prompt_is_refused_before_it_kills_the_thread(patched_server: ModuleType) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        tokenize(patched_server, text="")


def test_a_prompt_longer_than_the_context_is_refused(patched_server: ModuleType) -> None:
    with plugged(Prepares(ValueError("it is not asked"))):
        with pytest.raises(RequestRefused, match="prompt is too long: 5 tokens > 4 maximum") as e:
            tokenize(patched_server, text="abcde", max_context=4)
        assert (e.value.status, e.value.code) == (400, "context_length_exceeded")
        assert tokenize(patched_server, text="abcd", max_context=4)[1][0] == [97, 98, 99, 100]


def test_a_prompt_with_images_is_not_touched() -> None:
    """From 0.32.1 stock returns the images last; their positions belong to these ids."""
    vision = object()

    class Stock:
        def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
            return [1, 2], [[1, 2]], ["assistant"], "normal", vision

    generator = type("Patched", (PluginResponseGenerator, Stock), {})()
    generator.model_provider = SimpleNamespace(max_context=2)
    request = SimpleNamespace(request_type="chat", messages=[])
    with plugged(Prepares(Prompt([9], [[9]], ["user"]))):
        result = generator._tokenize(None, request, GENERATION_ARGS)
    assert result == ([1, 2], [[1, 2]], ["assistant"], "normal", vision)
    assert type(result[0]) is list


class Times:
    """Notes when the tokens of each reply came."""

    def __init__(self) -> None:
        self.n_tokens: list[int] = []

    @hookimpl
    def reply_timed(self, times_s: list[float]) -> None:
        self.n_tokens.append(len(times_s))


def test_a_request_is_open_until_it_has_ended_however_it_ends() -> None:
    answers: list[Any] = [RuntimeError("no"), "ab", "ab"]

    class Stock:
        def generate(self, request: Any, args: Any) -> Any:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return SimpleNamespace(tool_parser=None), iter(answer)

    generator: Any = object.__new__(type("Patched", (PluginResponseGenerator, Stock), {}))
    generator.open_requests = OpenRequests()

    def ask() -> Any:
        return generator.generate(SimpleNamespace(), GENERATION_ARGS)[1]

    with plugged(times := Times()):
        with pytest.raises(RuntimeError, match="no"):
            ask()
        assert not len(generator.open_requests) and times.n_tokens == [0]
        left = ask()
        assert next(left) == "a" and len(generator.open_requests) == 1
        left.close()
        assert not len(generator.open_requests) and times.n_tokens == [0, 1]
        assert list(ask()) == ["a", "b"]
        assert not len(generator.open_requests) and times.n_tokens == [0, 1, 2]


def test_no_clients_thread_builds_a_models_graph(patched_server: ModuleType) -> None:
    """Which ids the model has is asked on the generation thread: mlx 0.31.2 aborts elsewhere."""
    asked: list[str] = []

    class Provider(SimpleNamespace):
        @property
        def n_logits(self) -> int:
            asked.append("n_logits")
            return 10

    generator = object.__new__(patched_server.ResponseGenerator)
    generator.model_provider = Provider(
        cli_args=ARGS,
        processor=None,
        max_context=None,
        tokenizer=TOKENIZER,
        is_ready=True,
        is_loading=False,
        model_key=("probe", None, None),
        _model_map={},
    )
    args = SimpleNamespace(**vars(GENERATION_ARGS))
    args.model, args.sampling = (
        SimpleNamespace(model="probe"),
        SimpleNamespace(top_k=10, temperature=1.0),
    )
    request = patched_server.CompletionRequest("text", "abc", [], None, None)
    with plugged(Prepares()):
        generator._render_ahead(request, args)
        assert request.rendered is not None and generator.count_tokens(request, args) == 3
        assert asked == []
        with pytest.raises(RequestRefused, match="top_k is 10, expected 0"):
            generator._tokenize(TOKENIZER, request, args)
    assert asked == ["n_logits"]
