"""Tokenizing between two hooks: allowed changes of a prompt, and the cost of failures."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.errors import ClientGone, RequestRefused
from mlx_lm_kvpersist.host.hooks import ClientRequest, Prepared, Prompt, TakenRequest, hookimpl
from mlx_lm_kvpersist.host.manager import TakenTokens
from mlx_lm_kvpersist.host.patching.probes import ARGS, GENERATION_ARGS
from mlx_lm_kvpersist.host.scheduling.response_generator import PluginResponseGenerator
from tests.support.host import plugged

TOKENIZER = SimpleNamespace(has_chat_template=False, encode=lambda text: list(text.encode()))


class Prepares:
    """Prepares as the test says."""

    def __init__(self, prompt: Any = None, messages: Any = None) -> None:
        self.prompt, self.messages = prompt, messages
        self.n_messages = 0
        self.given: tuple[Any, ...] = ()

    @hookimpl
    def prepare_messages(self, messages: list[Any]) -> None:
        self.n_messages += 1
        if isinstance(self.messages, Exception):
            raise self.messages

    @hookimpl
    def take_request(self, request: ClientRequest, prompt: Prompt) -> Any:
        self.given = request, prompt
        if isinstance(self.prompt, Exception):
            raise self.prompt
        return self.prompt and Enters(prompt, self.prompt)


class Enters(TakenRequest):
    """Enters with the prompt or the answer that the test says."""

    def __init__(self, prompt: Prompt, answer: Any) -> None:
        super().__init__(prompt)
        self.answer = answer

    def enter(self) -> Any:
        if isinstance(self.answer, ClientGone):
            raise self.answer
        if isinstance(self.answer, tuple):
            return Prepared(*self.answer)
        return Prepared(self.answer) if isinstance(self.answer, Prompt) else self.answer


def tokenize(
    server: ModuleType, text: str = "abc", kind: str = "text", max_context: int | None = None
) -> Any:
    """Tokenize a request with the server's own code, as its generation thread does."""
    generator = object.__new__(server.ResponseGenerator)
    generator.model_provider = SimpleNamespace(
        cli_args=ARGS, processor=None, reads_images=False, max_context=max_context
    )
    messages = [{"role": "user", "content": text}] if kind == "chat" else []
    request = server.CompletionRequest(kind, text, messages, None, None)
    return request, generator._tokenize(TOKENIZER, request, GENERATION_ARGS)


def test_ids_and_their_slices_know_who_took_them(patched_server: ModuleType) -> None:
    prompt = Prompt([97, 98, 99], [[97, 98, 99]], ["assistant"])
    with plugged(plugin := Prepares(prompt)):
        request, (ids, segments, types, *_) = tokenize(patched_server)
    assert plugin.given == (ClientRequest.of(request), prompt)
    assert (ids, segments, types) == ([97, 98, 99], [[97, 98, 99]], ["assistant"])
    key = ids[:2]
    key += [1, 2]  # as the batch generator does
    key.append(3)
    assert key == [97, 98, 1, 2, 3] and key[-1] == 3
    assert isinstance(key, TakenTokens) and key[:].taken is ids.taken


def test_what_no_plugin_takes_is_stocks(patched_server: ModuleType) -> None:
    with plugged(Prepares()):
        _, (ids, *_) = tokenize(patched_server)
    assert type(ids) is list and ids == [97, 98, 99]


def test_a_plugin_that_fails_or_answers_nonsense_leaves_the_request_to_the_next(
    patched_server: ModuleType,
) -> None:
    class Nonsense:
        @hookimpl
        def take_request(self) -> str:
            return "nonsense"

    for first in (Prepares(ValueError("bug")), Nonsense()):
        with plugged(first, Prepares(Prompt([7], [[7]], ["user"]))):
            _, (ids, *_) = tokenize(patched_server)
        assert ids == [7]


def test_a_client_that_left_is_no_failure_of_the_plugin_that_noticed(
    patched_server: ModuleType,
) -> None:
    class Leaves(Prepares):
        @hookimpl
        def take_request(self, request: ClientRequest, prompt: Prompt) -> Any:
            return Enters(prompt, ClientGone())

    with plugged(Leaves()), pytest.raises(ClientGone):
        tokenize(patched_server)


def test_messages_are_prepared_for_chats_only(patched_server: ModuleType) -> None:
    with plugged(prepares := Prepares()):
        tokenize(patched_server, kind="text")
        assert prepares.n_messages == 0
        tokenize(patched_server, kind="chat")
        assert prepares.n_messages == 1


def test_a_refused_message_reaches_the_client(patched_server: ModuleType) -> None:
    with (
        plugged(Prepares(messages=RequestRefused("no such agent"))),
        pytest.raises(RequestRefused, match="no such agent"),
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
        (Prompt([1, 2], [[1, 2]], ["user"]), ["caches"], 2),
        (Prompt([1, 2], [[1, 2]], ["user"]), None, 1),
        (Prompt([1, 2], [[1, 2]], ["user"]), ["caches"], 0),
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
    with plugged(Prepares(ValueError("this hook is not called"))):
        with pytest.raises(RequestRefused, match="prompt is too long: 5 tokens > 4 maximum") as e:
            tokenize(patched_server, text="abcde", max_context=4)
        assert (e.value.status, e.value.code) == (400, "context_length_exceeded")
        assert tokenize(patched_server, text="abcd", max_context=4)[1][0] == [97, 98, 99, 100]


@dataclass
class Vision:
    """As stock has it from 0.32.1."""

    pixel_values: list[mx.array]
    starts: list[int]
    cache_key: list[int]


def test_plugins_know_an_image_by_what_the_model_is_given_of_it() -> None:
    patch, pixels = 7, mx.arange(12).reshape(3, 2, 2)
    given = [1, patch, patch, 2, patch]
    vision = Vision([pixels, pixels + 1], [1, 4], [1, -5, -5, 2, -6])

    class Stock:
        def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
            return given, [given], ["assistant"], "normal", vision

    class Longer:
        @hookimpl
        def take_request(self, prompt: Prompt) -> TakenRequest:
            prompts.append(prompt)
            return TakenRequest(Prompt([0, *prompt.ids], [[0], prompt.ids], ["system", "user"]))

    prompts: list[Prompt] = []
    generator = type("Patched", (PluginResponseGenerator, Stock), {})()
    generator.model_provider = SimpleNamespace(max_context=5, reads_images=True)
    parts = [{"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "text", "text": "?"}]
    messages = [{"role": "user", "content": [*parts, parts[0]]}]
    request = SimpleNamespace(request_type="chat", prompt="", messages=messages, tools=None)
    with plugged(Longer()):
        ids, _, types, state, fed = generator._tokenize(None, request, GENERATION_ARGS)
    (prompt,) = prompts
    first, second = prompt.ids[1], prompt.ids[4]
    assert prompt.ids == (1, first, -1, 2, second)
    assert first < -(2**256) and second < -(2**256) and first != second
    names = [{"type": "image", "image": f"{-one:x}"} for one in (first, second)]
    assert prompt.messages == [{"role": "user", "content": [names[0], parts[1], names[1]]}]
    assert (ids, types, state) == ([0, *given], ["system", "user"], "normal")
    assert (fed.starts, fed.cache_key) == ([2, 5], [0, *prompt.ids])
    assert isinstance(fed.cache_key, TakenTokens)
    assert vision.starts == [1, 4]  # as stock made them: the next request needs them


class Times:
    """Notes when the tokens of each reply came."""

    def __init__(self) -> None:
        self.n_tokens: list[int] = []

    @hookimpl
    def reply_timed(self, times_s: list[float]) -> None:
        self.n_tokens.append(len(times_s))


def test_plugins_are_told_once_when_the_tokens_of_a_reply_came_however_it_ends() -> None:
    answers: list[Any] = [RuntimeError("no"), "ab", "ab", "ab"]

    class Stock:
        def generate(self, request: Any, args: Any) -> Any:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return SimpleNamespace(tool_parser=None), iter(answer)

    generator: Any = object.__new__(type("Patched", (PluginResponseGenerator, Stock), {}))

    def request() -> Any:
        return SimpleNamespace(request_type="text", prompt="", messages=[])

    def ask() -> Any:
        return generator.generate(request(), GENERATION_ARGS)[1]

    with plugged(times := Times()):
        with pytest.raises(RuntimeError, match="no"):
            ask()
        assert times.n_tokens == [0]
        left = ask()
        assert next(left) == "a" and times.n_tokens == [0]
        left.close()
        assert times.n_tokens == [0, 1]
        assert list(ask()) == ["a", "b"]
        assert times.n_tokens == [0, 1, 2]
        ask().close()  # the client left before the head of its stream was sent
        assert times.n_tokens == [0, 1, 2, 0]


def test_no_clients_thread_builds_a_models_graph(patched_server: ModuleType) -> None:
    """The generation thread finds out the model's ids: mlx 0.31.2 aborts on other threads."""
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
        reads_images=False,
        max_context=None,
        tokenizer=TOKENIZER,
        is_ready=True,
        is_loading=False,
        model_key=("probe", None, None),
        is_loaded=lambda name: name == "probe",
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
