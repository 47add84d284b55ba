"""Tokenizing between two hooks: allowed changes of a prompt, and failures of plugins."""

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


class FakePlugin:
    """A plugin that returns or raises the test's objects."""

    def __init__(self, prompt: Any = None, messages: Any = None) -> None:
        self.prompt, self.messages = prompt, messages
        self.n_messages = 0
        self.arguments: tuple[Any, ...] = ()

    @hookimpl
    def prepare_messages(self, messages: list[Any]) -> None:
        self.n_messages += 1
        if isinstance(self.messages, Exception):
            raise self.messages

    @hookimpl
    def take_request(self, request: ClientRequest, prompt: Prompt) -> Any:
        self.arguments = request, prompt
        if isinstance(self.prompt, Exception):
            raise self.prompt
        return self.prompt and FakeRequest(prompt, self.prompt)


class FakeRequest(TakenRequest):
    """A request that enters with the test's prompt or answer."""

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


def test_token_ids_and_their_slices_keep_the_taken_request(patched_server: ModuleType) -> None:
    prompt = Prompt([97, 98, 99], [[97, 98, 99]], ["user"])
    with plugged(plugin := FakePlugin(prompt)):
        request, (ids, segments, types, *_) = tokenize(patched_server)
    assert plugin.arguments == (ClientRequest.of(request), prompt)
    assert (ids, segments, types) == ([97, 98, 99], [[97, 98, 99]], ["user"])
    key = ids[:2]
    key += [1, 2]  # as the batch generator does
    key.append(3)
    assert key == [97, 98, 1, 2, 3] and key[-1] == 3
    assert isinstance(key, TakenTokens) and key[:].taken is ids.taken


def test_without_a_plugins_answer_stocks_ids_are_used(patched_server: ModuleType) -> None:
    with plugged(FakePlugin()):
        _, (ids, *_) = tokenize(patched_server)
    assert type(ids) is list and ids == [97, 98, 99]


def test_after_a_failed_or_invalid_answer_the_next_plugin_is_asked(
    patched_server: ModuleType,
) -> None:
    class Nonsense:
        @hookimpl
        def take_request(self) -> str:
            return "nonsense"

    for first in (FakePlugin(ValueError("bug")), Nonsense()):
        with plugged(first, FakePlugin(Prompt([7], [[7]], ["user"]))):
            _, (ids, *_) = tokenize(patched_server)
        assert ids == [7]


def test_client_gone_raised_by_a_plugin_reaches_the_caller(
    patched_server: ModuleType,
) -> None:
    class Leaves(FakePlugin):
        @hookimpl
        def take_request(self, request: ClientRequest, prompt: Prompt) -> Any:
            return FakeRequest(prompt, ClientGone())

    with plugged(Leaves()), pytest.raises(ClientGone):
        tokenize(patched_server)


def test_messages_are_prepared_for_chats_only(patched_server: ModuleType) -> None:
    with plugged(prepares := FakePlugin()):
        tokenize(patched_server, kind="text")
        assert prepares.n_messages == 0
        tokenize(patched_server, kind="chat")
        assert prepares.n_messages == 1


def test_refusal_by_prepare_messages_reaches_the_caller(patched_server: ModuleType) -> None:
    with (
        plugged(FakePlugin(messages=RequestRefused("no such agent"))),
        pytest.raises(RequestRefused, match="no such agent"),
    ):
        tokenize(patched_server, kind="chat")


def test_plugins_prompt_is_used_and_stock_gets_copies_of_its_lists(
    patched_server: ModuleType,
) -> None:
    prompt = Prompt([7, 8, 9], [[7], [8, 9]], ["system", "user"])
    with plugged(FakePlugin(prompt)):
        _, (ids, segments, types, *_) = tokenize(patched_server)
    segments.pop(0)
    types.pop(0)
    assert ids == [7, 8, 9]
    assert prompt == Prompt([7, 8, 9], [[7], [8, 9]], ["system", "user"])


@pytest.mark.parametrize(
    "answer",
    [
        ValueError("bug"),
        Prompt([1, 2], [[1], [3]], ["system", "user"]),
        Prompt([1, 2], [[1, 2], []], ["system", "user"]),
        Prompt([1, 2], [[1], [2]], ["user", "assistant"]),
        Prompt([1, 2], [[1, 2]], []),
        Prompt([], [], []),
        (Prompt([1, 2], [[1, 2]], ["user"]), ["caches"], 2),
        (Prompt([1, 2], [[1, 2]], ["user"]), None, 1),
        (Prompt([1, 2], [[1, 2]], ["user"]), ["caches"], 0),
        "not a Prepared",
    ],
)
def test_invalid_prompt_of_a_plugin_is_ignored_and_logged(
    patched_server: ModuleType, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with plugged(FakePlugin(answer)):
        _, (ids, *_) = tokenize(patched_server)
    assert ids == [97, 98, 99]
    assert "hook take_request" in caplog.text


def test_empty_prompt_raises_value_error(patched_server: ModuleType) -> None:
    with pytest.raises(ValueError, match="no tokens"):
        tokenize(patched_server, text="")


def test_a_prompt_longer_than_the_context_is_refused(patched_server: ModuleType) -> None:
    with plugged(FakePlugin(ValueError("this hook is not called"))):
        with pytest.raises(
            RequestRefused, match="prompt is too long: 5 tokens > 4 maximum"
        ) as raised:
            tokenize(patched_server, text="abcde", max_context=4)
        assert (raised.value.status, raised.value.code) == (400, "context_length_exceeded")
        assert tokenize(patched_server, text="abcd", max_context=4)[1][0] == [97, 98, 99, 100]


@dataclass
class Vision:
    """Stock's record of a prompt's images, since 0.32.1."""

    pixel_values: list[mx.array]
    starts: list[int]
    cache_key: list[int]


def test_plugins_get_image_ids_and_the_model_gets_patch_tokens() -> None:
    patch, pixels = 7, mx.arange(12).reshape(3, 2, 2)
    model_ids = [1, patch, patch, 2, patch]
    vision = Vision([pixels, pixels + 1], [1, 4], [1, -5, -5, 2, -6])

    class Stock:
        def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
            return model_ids, [model_ids], ["assistant"], "normal", vision

    class AddsToken:
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
    with plugged(AddsToken()):
        ids, _, types, state, fed = generator._tokenize(None, request, GENERATION_ARGS)
    (prompt,) = prompts
    first, second = prompt.ids[1], prompt.ids[4]
    assert prompt.ids == (1, first, -1, 2, second)
    assert first < -(2**256) and second < -(2**256) and first != second
    names = [{"type": "image", "image": f"{-image_id:x}"} for image_id in (first, second)]
    assert prompt.messages == [{"role": "user", "content": [names[0], parts[1], names[1]]}]
    assert (ids, types, state) == ([0, *model_ids], ["system", "user"], "normal")
    assert (fed.starts, fed.cache_key) == ([2, 5], [0, *prompt.ids])
    assert isinstance(fed.cache_key, TakenTokens)
    assert vision.starts == [1, 4]  # unchanged: the next request needs them


class Times:
    """Records the number of token times of each reply."""

    def __init__(self) -> None:
        self.n_tokens: list[int] = []

    @hookimpl
    def reply_timed(self, times_s: list[float]) -> None:
        self.n_tokens.append(len(times_s))


def test_reply_timed_is_called_once_however_a_reply_ends() -> None:
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
        stream = ask()
        assert next(stream) == "a" and times.n_tokens == [0]
        stream.close()
        assert times.n_tokens == [0, 1]
        assert list(ask()) == ["a", "b"]
        assert times.n_tokens == [0, 1, 2]
        ask().close()  # the client left before the head of its stream was sent
        assert times.n_tokens == [0, 1, 2, 0]


def test_http_threads_do_not_build_the_models_graph(patched_server: ModuleType) -> None:
    """Reading `n_logits` builds the graph, and mlx 0.31.2 may abort if an HTTP thread does so."""
    n_logits_reads: list[str] = []

    class Provider(SimpleNamespace):
        @property
        def n_logits(self) -> int:
            n_logits_reads.append("n_logits")
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
    with plugged(FakePlugin()):
        generator._render_ahead(request, args)
        assert request.rendered is not None and generator.count_tokens(request, args) == 3
        assert n_logits_reads == []
        with pytest.raises(RequestRefused, match="top_k is 10, expected 0"):
            generator._tokenize(TOKENIZER, request, args)
    assert n_logits_reads == ["n_logits"]


def test_token_count_of_an_unloaded_model_is_refused_with_a_remedy(
    patched_server: ModuleType,
) -> None:
    """Without `--model`, no model is loaded until a client asks for a reply."""
    generator = object.__new__(patched_server.ResponseGenerator)
    generator.model_provider = SimpleNamespace(
        cli_args=ARGS,
        is_ready=True,
        is_loading=False,
        model_key=None,
        is_loaded=lambda name: False,
    )
    args = SimpleNamespace(model=SimpleNamespace(model="probe"))
    request = patched_server.CompletionRequest("text", "abc", [], None, None)
    message = "probe is not loaded; a request for a reply loads it"
    with pytest.raises(RequestRefused, match=message) as refused:
        generator.count_tokens(request, args)
    assert refused.value.status == 400
