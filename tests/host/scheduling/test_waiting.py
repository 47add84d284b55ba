"""Requests that wait for a plugin's data, and the requests that may pass them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.errors import RequestRefused
from mlx_lm_kvpersist.host.hooks import ClientRequest, Prompt, TakenRequest, hookimpl
from mlx_lm_kvpersist.host.patching.probes import ARGS, GENERATION_ARGS
from mlx_lm_kvpersist.host.scheduling.waiting import (
    ARRIVING,
    GAP_S,
    LARGE_S,
    QUIET_GAP_S,
    WORK_S,
    AdmissionQueue,
)
from tests.support.clock import Clock
from tests.support.host import plugged

TOKENIZER = SimpleNamespace(has_chat_template=False, encode=lambda text: list(text.encode()))
SERVING = None
IDLE = 0.01


class FetchingRequest(TakenRequest):
    """A request that may enter when its plugin allows it."""

    def __init__(self, plugin: FetchingPlugin, text: str, prompt: Prompt) -> None:
        super().__init__(prompt)
        self.plugin, self.text = plugin, text
        self.is_fetched: Callable[[], bool] | None = None

    def advance(self) -> bool:
        if self.is_fetched is None:
            self.plugin.begun.append(self.text)
            self.is_fetched = self.plugin.fetch(self.text)
        return self.is_fetched()


class FetchingPlugin:
    """A plugin that fetches data for prompts that begin with "w", until they are in `fetched`."""

    def __init__(self) -> None:
        self.fetched: set[str] = set()
        self.begun: list[str] = []
        self.n_idle = 0
        self.failing: BaseException | None = None
        self.n_prepared = 0

    @hookimpl
    def idle(self) -> None:
        self.n_idle += 1

    @hookimpl
    def prepare_messages(self, messages: list[Any]) -> None:
        self.n_prepared += 1
        if messages == []:
            raise RequestRefused("refused")

    @hookimpl
    def take_request(self, request: ClientRequest, prompt: Prompt) -> FetchingRequest:
        if request.prompt == "raise":
            raise ValueError("bug")
        return FetchingRequest(self, request.prompt, prompt)

    def fetch(self, prompt: str) -> Callable[[], bool]:
        def is_fetched() -> bool:
            if self.failing is not None:
                raise self.failing
            return prompt in self.fetched or not prompt.startswith("w")

        return is_fetched


@pytest.fixture
def plugin() -> Iterator[FetchingPlugin]:
    with plugged(made := FetchingPlugin()):
        yield made


@pytest.fixture
def generator(
    patched_server: ModuleType, plugin: FetchingPlugin, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """The server's generator without its thread; one request has entered."""
    monkeypatch.setattr(patched_server.ResponseGenerator, "_generate", lambda self: None)
    provider = SimpleNamespace(
        cli_args=ARGS,
        tokenizer=TOKENIZER,
        processor=None,
        reads_images=False,
        is_batchable=True,
        max_context=40,
    )
    made = patched_server.ResponseGenerator(provider, None)
    made.join()
    put(made, "first")
    assert take(made, IDLE) == "first"
    return made


def put(
    generator: Any, prompt: str, model: str = "model", seed: int | None = None, **request: Any
) -> Any:
    made = SimpleNamespace(request_type="text", prompt=prompt, messages=[], tools=None, **request)
    args = {**vars(GENERATION_ARGS), "model": model, "seed": seed}
    generator.requests.put((Queue(), made, SimpleNamespace(**args)))
    return made


def take(generator: Any, timeout: float | None = SERVING) -> str | None:
    """Take a request as the server's loop does, and tokenize it."""
    queued = generator._next_request(timeout)
    if queued is None:
        return None
    _, request, args = queued
    ids, *_ = generator._tokenize(TOKENIZER, request, args)
    assert bytes(ids).decode() == request.prompt
    return str(request.prompt)


def test_ready_requests_pass_waiting_requests(
    generator: Any, plugin: FetchingPlugin, caplog: pytest.LogCaptureFixture
) -> None:
    for prompt in ("w1", "a", "w2", "b"):
        put(generator, prompt)
    assert [take(generator) for _ in range(3)] == ["a", "b", None]
    plugin.fetched |= {"w2"}
    assert [take(generator) for _ in range(2)] == ["w2", None]
    plugin.fetched |= {"w1"}
    assert [take(generator) for _ in range(2)] == ["w1", None]
    assert plugin.begun == ["w1", "a", "w2", "b"]
    assert "prefetch failed" not in caplog.text


def test_idle_hook_is_called_while_no_request_is_served(
    generator: Any, plugin: FetchingPlugin
) -> None:
    """The next request enters as usual."""
    put(generator, "served")
    assert take(generator) == "served" and take(generator) is None
    assert plugin.n_idle == 0
    assert [take(generator, IDLE) for _ in range(3)] == [None] * 3
    assert plugin.n_idle == 4  # the first call came when the batch ended
    put(generator, "next")
    assert take(generator, IDLE) == "next" and plugin.n_idle == 4
    assert take(generator, IDLE) is None and plugin.n_idle == 6


class Work:
    """The plugin's work for each prompt: `n_calls` calls that take `seconds` each."""

    def __init__(
        self, plugin: FetchingPlugin, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.clock = clock
        self.calls: list[str] = []
        self.seconds: dict[str, float] = {}
        self.n_calls: dict[str, int] = {}
        monkeypatch.setattr(plugin, "fetch", self.fetch)

    def fetch(self, prompt: str) -> Callable[[], bool]:
        def advance() -> bool:
            self.calls.append(prompt)
            self.clock.sleep(self.seconds.get(prompt, 0.0))
            return self.calls.count(prompt) >= self.n_calls.get(prompt, 1)

        return advance


@pytest.fixture
def running_reply(generator: Any) -> Any:
    """A reply that has begun: new requests may delay it by GAP_S."""
    reply = SimpleNamespace(has_begun=True, is_over=False, is_stopped=False)
    generator._replies.append(reply)
    return reply


@pytest.fixture
def work(plugin: FetchingPlugin, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Work:
    return Work(plugin, clock, monkeypatch)


def test_between_two_steps_only_one_waiting_request_does_work(
    generator: Any, work: Work, running_reply: Any
) -> None:
    work.seconds["w2"] = 2 * WORK_S
    work.n_calls = dict.fromkeys(("w1", "w2", "w3"), 9)
    for prompt in ("w1", "w2", "w3"):
        put(generator, prompt)
    assert take(generator) is None
    work.calls.clear()
    assert not generator._is_asked() and work.calls == ["w1", "w2"]
    assert not generator._is_asked() and work.calls == ["w1", "w2", "w1", "w2"]


def test_ready_request_enters_before_other_requests_do_work(
    generator: Any, work: Work, running_reply: Any
) -> None:
    work.n_calls = {"w1": 2, "w2": 9}
    put(generator, "w1")
    put(generator, "w2")
    assert take(generator) is None and generator._is_asked()
    work.calls.clear()
    assert generator._is_asked() and not work.calls
    assert take(generator) == "w1"


def test_small_restore_passes_a_large_restore_that_still_makes_progress(
    generator: Any, work: Work, running_reply: Any
) -> None:
    work.seconds = {"w1": LARGE_S / 4, "w2": 2 * WORK_S}
    work.n_calls = {"w1": 99, "w2": 9}
    put(generator, "w1")
    put(generator, "w2")
    for _ in range(40):
        if generator._is_asked() and take(generator) == "w2":
            break
    else:
        take(generator)
        pytest.fail(f"w2 still waits after {work.calls}")
    # w1 works first until it has taken LARGE_S, then in every third pause.
    assert 6 <= work.calls.count("w1") < 12


def test_request_of_a_client_that_left_is_removed_without_work(generator: Any, work: Work) -> None:
    work.n_calls["w1"] = 99
    request = put(generator, "w1")
    assert take(generator) is None
    ClientRequest.of(request).client_gone = True
    work.calls.clear()
    assert generator._is_asked() and not work.calls
    assert take(generator) is None and not generator._admission


def test_empty_admission_queue_does_not_delay_the_next_step() -> None:
    assert not AdmissionQueue().step_ended()


@pytest.mark.parametrize(("n_restores", "n_short"), [(0, 12), (12, 0), (8, 8)])
def test_replies_make_steps_while_many_requests_enter(
    generator: Any,
    work: Work,
    monkeypatch: pytest.MonkeyPatch,
    running_reply: Any,
    n_restores: int,
    n_short: int,
) -> None:
    """The requests take GAP_S plus the time of one request, then replies make a step; all enter."""
    begun: list[Any] = []
    render = generator._rendered

    def rendered(*args: Any) -> Any:
        begun.append(args)
        work.clock.sleep(GAP_S / 2)
        return render(*args)

    monkeypatch.setattr(generator, "_rendered", rendered)
    names = [f"w{n}" for n in range(n_restores)] + [f"a{n}" for n in range(n_short)]
    work.seconds = dict.fromkeys(names, GAP_S / 2)
    work.n_calls = dict.fromkeys(names, 2)
    for name in names:
        put(generator, name)
    entered: list[str] = []
    max_begun = n_before = 0
    while len(entered) < len(names):
        while (entering := take(generator)) is not None:
            entered.append(entering)
        while not generator._looks_first():
            max_begun, n_before = max(max_begun, len(begun) - n_before), len(begun)
            if len(entered) == len(names):
                break
    assert sorted(entered) == sorted(names)
    assert max_begun <= 3, "each request takes at least half of GAP_S to begin"


def test_simultaneous_requests_enter_before_the_first_step_of_each_batch(
    generator: Any, work: Work
) -> None:
    """The last step of an earlier batch does not count: it may have ended long ago."""
    for batch in range(2):
        names = [f"a{batch}{n}" for n in range(4)]
        for name in names:
            put(generator, name)
        assert generator._next_request(IDLE)[1].prompt == names[0]
        assert [take(generator) for _ in names] == [*names[1:], None]
        assert not generator._is_asked()
        assert generator._next_request(IDLE) is None  # the batch has ended
        work.clock.advance(100.0)


def test_before_the_first_reply_all_restores_end_and_enter_together(
    generator: Any, work: Work
) -> None:
    names = ["w1", "w2", "w3"]
    work.seconds, work.n_calls = dict.fromkeys(names, 2 * WORK_S), dict.fromkeys(names, 4)
    work.n_calls["s"] = 10**9  # its own work does not make it ready
    for name in ["w1", "s", "w2", "w3"]:
        put(generator, name)
    assert [take(generator) for _ in range(4)] == [*names, None]
    assert work.calls.count("s") < 20


def test_request_that_is_ready_just_after_the_pause_still_enters(
    generator: Any, work: Work
) -> None:
    work.seconds, work.n_calls = {"w1": 0.4 * QUIET_GAP_S}, {"w1": 3}
    put(generator, "w1")
    assert take(generator) == "w1" and work.calls == ["w1"] * 3


class Waits:
    """Counts the server's waits for an arriving request."""

    def __init__(self, generator: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n = 0
        self.during: Callable[[], object] = lambda: None
        """Called in each wait."""
        self._get, self._clock = generator.requests.get, clock
        monkeypatch.setattr(generator.requests, "get", self.get)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if timeout:
            self.n += 1
            self.during()
            self._clock.sleep(timeout)
        return self._get(False)


@pytest.fixture
def waits(generator: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Waits:
    return Waits(generator, clock, monkeypatch)


def test_first_request_waits_for_a_request_that_is_about_to_arrive(
    generator: Any, clock: Clock, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(generator, "a1")
    monkeypatch.setitem(ARRIVING, threading.get_ident(), clock.perf_counter())
    waits.during = lambda: put(generator, "a2") if waits.n == 3 else None
    assert [take(generator) for _ in range(3)] == ["a1", "a2", None]
    assert waits.n == 3 and not ARRIVING


def test_wait_for_an_arriving_request_is_short_and_ends_without_it(
    generator: Any, clock: Clock, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An HTTP request may have a long body, or need no reply."""
    monkeypatch.setitem(ARRIVING, 1, clock.perf_counter())
    waits.during = lambda: ARRIVING.clear() if waits.n == 3 else None
    put(generator, "a1")
    assert [take(generator) for _ in range(2)] == ["a1", None]
    assert waits.n == 3
    began_s = clock.perf_counter()
    monkeypatch.setitem(ARRIVING, 1, began_s)
    waits.during = lambda: None
    generator._set_serving(False)
    generator._set_serving(True)
    assert take(generator) is None
    assert began_s < clock.perf_counter() < began_s + QUIET_GAP_S
    n_before = waits.n
    generator._set_serving(False)
    generator._set_serving(True)
    assert take(generator) is None and waits.n == n_before


def test_long_restore_delays_neither_the_first_step_nor_other_requests(
    generator: Any, work: Work
) -> None:
    work.seconds, work.n_calls = {"w1": QUIET_GAP_S / 5}, {"w1": 10**9, "w2": 2}
    put(generator, "w1")
    put(generator, "w2")
    assert take(generator) is None  # a step comes first
    assert 2 < work.calls.count("w1") < 10
    entered = [take(generator) for _ in range(9)]
    assert entered.count("w2") == 1 and set(entered) == {"w2", None}


def test_ended_replies_of_unbatched_requests_are_forgotten(generator: Any) -> None:
    before = len(generator._replies)
    for _ in range(20):
        put(generator, "s", seed=1)
        reply = generator._next_request(IDLE)[0]
        reply._queue = SimpleNamespace(put=lambda item: None)
        reply.put(SimpleNamespace(stop=lambda: None))
        reply.put(None)
    assert len(generator._replies) <= before + 1


def test_stopped_reply_makes_stock_look_for_requests_once(generator: Any) -> None:
    """Otherwise stock would look for requests after every step."""
    put(generator, "s", seed=1)
    reply = generator._next_request(IDLE)[0]
    reply._queue = SimpleNamespace(put=lambda item: None)
    reply.put(context := SimpleNamespace(stop=lambda: None))
    assert not generator._is_asked()
    context.stop()
    assert [generator._is_asked(), generator._is_asked()] == [True, False]


CALL = {"function": {"name": "f", "arguments": '{"a": 1}'}}


@pytest.fixture
def chat(generator: Any) -> Any:
    """A chat with a tool call, for the loaded model."""
    provider = generator.model_provider
    provider.is_ready, provider.is_loading = True, False
    provider.is_loaded = lambda name: not provider.is_loading and name == "m"
    provider.model_key, provider.tokenizer = ("m", None, None), chat_tokenizer()
    provider.max_context = None
    provider.cli_args.chat_template_args = {}
    call: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    messages = [{"role": "user", "content": "x"}, call, {"role": "tool", "content": "y"}]
    return SimpleNamespace(
        request_type="chat", prompt="", messages=messages, tools=None, role_mapping=None
    )


def chat_tokenizer() -> Any:
    return SimpleNamespace(
        has_chat_template=True,
        has_tool_calling=True,
        has_thinking=False,
        response_initial_state=None,
        apply_chat_template=lambda messages, **_: list(repr(messages).encode()),
    )


def chat_args() -> Any:
    model = SimpleNamespace(model="m")
    return SimpleNamespace(
        **{**vars(GENERATION_ARGS), "model": model, "chat_template_kwargs": None}
    )


def test_prompt_rendered_ahead_is_rendered_again_for_another_tokenizer(
    generator: Any, chat: Any
) -> None:
    """Rendering changes messages, and mlx-lm 0.31.3 cannot render changed messages again."""

    class Marks:
        @hookimpl
        def prepare_messages(self, messages: list[Any]) -> None:
            messages[0]["content"] += "!"

    before = copy.deepcopy(chat.messages)
    with plugged(Marks()):
        generator._render_ahead(chat, chat_args())
        assert chat.rendered is not None and chat.messages == before
        own = generator.model_provider.tokenizer
        ahead, *_ = generator._rendered(own, chat, chat_args()).stock
        again, *_ = generator._tokenize(chat_tokenizer(), chat, chat_args())
    assert again == ahead and b"x!'" in bytes(again)


def test_template_error_is_raised_when_the_request_enters(generator: Any, chat: Any) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("the template's own reason")

    tokenizer = generator.model_provider.tokenizer
    tokenizer.apply_chat_template = fail
    before = copy.deepcopy(chat.messages)
    generator._render_ahead(chat, chat_args())
    assert chat.messages == before
    with pytest.raises(RequestRefused, match="the template's own reason"):
        generator._tokenize(tokenizer, chat, chat_args())


def test_no_prompt_is_rendered_ahead_while_a_model_loads(generator: Any, chat: Any) -> None:
    generator.model_provider.is_loading = True
    generator._render_ahead(chat, chat_args())
    assert not hasattr(chat, "rendered")


def test_while_nothing_is_served_the_oldest_request_enters(
    generator: Any, plugin: FetchingPlugin
) -> None:
    put(generator, "w1")
    put(generator, "w2")
    assert take(generator) is None
    put(generator, "c")
    assert [take(generator, IDLE) for _ in range(4)] == ["w1", "w2", "c", None]
    assert plugin.begun == ["w1", "w2"]


@pytest.mark.parametrize(
    "other",
    [
        {"model": "other"},
        {"seed": 7},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ],
)
def test_request_that_would_end_the_batch_passes_no_other_request(
    generator: Any, plugin: FetchingPlugin, other: dict[str, Any]
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
    # No request passes this request: on a busy server it would wait for ever.
    assert plugin.begun == ["w1"]
    plugin.fetched |= {"w1"}
    assert [take(generator) for _ in range(2)] == ["w1", "image"]
    assert plugin.begun == ["w1"], "the other model's tokenizer is not loaded yet"


def test_a_waiting_request_is_tokenized_once(generator: Any, plugin: FetchingPlugin) -> None:
    request = put(generator, "w1")
    request.request_type, request.role_mapping = "chat", None
    request.tools, request.messages = None, [{"role": "user", "content": "x"}]
    assert generator._next_request() is None
    plugin.fetched |= {"w1"}
    queued = generator._next_request()
    generator._tokenize(TOKENIZER, request, queued[2])
    assert plugin.n_prepared == 1
    generator._tokenize(TOKENIZER, request, queued[2])
    assert plugin.n_prepared == 2


def test_taken_request_refers_to_its_reply(generator: Any) -> None:
    """The batch generator uses the reply to notice that a client left, and to send errors."""

    class Takes:
        @hookimpl
        def take_request(self, prompt: Prompt) -> TakenRequest:
            return TakenRequest(prompt)

    with plugged(Takes()):
        put(generator, "a")
        reply, request, args = generator._next_request(IDLE)
        ids, *_ = generator._tokenize(TOKENIZER, request, args)
        assert ids.taken.reply is reply
        other, *_ = generator._tokenize(TOKENIZER, request, args)
        assert other.taken.reply is None


def test_waiting_request_is_tokenized_again_for_a_new_model(
    generator: Any, plugin: FetchingPlugin
) -> None:
    request = put(generator, "w1")
    assert generator._next_request() is None
    queued = generator._next_request(IDLE)
    other = SimpleNamespace(has_chat_template=False, encode=lambda text: [1, 2, 3])
    assert generator._tokenize(other, request, queued[2])[0] == [1, 2, 3]


def test_refusal_of_a_queued_request_is_raised_when_it_is_tokenized(
    generator: Any, plugin: FetchingPlugin
) -> None:
    request = put(generator, "refuse")
    request.request_type = "chat"
    queued = generator._next_request()
    with pytest.raises(RequestRefused, match="refused"):
        generator._tokenize(TOKENIZER, request, queued[2])
    assert plugin.n_prepared == 1


def test_failing_plugin_does_not_delay_requests(
    generator: Any, plugin: FetchingPlugin, caplog: pytest.LogCaptureFixture
) -> None:
    put(generator, "raise")
    assert take(generator) == "raise"
    put(generator, "w1")
    assert take(generator) is None
    plugin.failing = ValueError("bug")
    assert take(generator) == "w1"
    assert "failed in hook take_request" in caplog.text


@pytest.mark.parametrize("messages", [["hi"], [None], "hi", 5, [{"content": [None]}]])
def test_malformed_messages_raise_only_when_they_are_tokenized(
    generator: Any, messages: Any
) -> None:
    """mlx-lm 0.31.3 and 0.32.0 queue such requests. An error in `_next_request` ends the thread."""
    put(generator, "w1")
    assert take(generator) is None
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
    generator: Any, plugin: FetchingPlugin
) -> None:
    request = put(generator, "w" * 41)
    queued = generator._next_request()
    assert queued[1] is request and plugin.begun == []
    with pytest.raises(ValueError, match="41 tokens > 40 maximum"):
        generator._tokenize(TOKENIZER, request, queued[2])


def test_queued_empty_prompt_is_refused_when_it_is_tokenized(generator: Any) -> None:
    request = put(generator, "")
    queued = generator._next_request()
    with pytest.raises(ValueError, match="no tokens"):
        generator._tokenize(TOKENIZER, request, queued[2])


def test_steps_continue_until_a_waiting_request_is_ready(
    generator: Any, plugin: FetchingPlugin
) -> None:
    put(generator, "w1")
    assert take(generator) is None
    n_steps = 0
    while not generator._looks_first():
        n_steps += 1
        if n_steps == 3:
            plugin.fetched |= {"w1"}
    assert n_steps == 3
    assert take(generator) == "w1"


def test_server_is_healthy_if_it_is_ready_and_takes_requests(generator: Any) -> None:
    healthy = []
    for is_ready in (True, False):
        generator.model_provider.is_ready = is_ready
        healthy.append(generator.is_healthy)
    assert healthy == [True, False]
    generator.model_provider.is_ready = True
    generator.requests.refusal = ValueError("the server ends")
    assert generator.is_healthy is False


def test_first_step_after_stock_looked_needs_no_check(
    generator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[None] = []
    monkeypatch.setattr(generator, "_is_asked", lambda: checks.append(None))
    for _ in range(3):
        assert take(generator) is None
    assert [generator._looks_first() for _ in range(3)] == [False, None, None]
    assert len(checks) == 2


def test_steps_continue_while_a_queued_request_cannot_join(generator: Any) -> None:
    """Stock takes no request then, and the queued request stays in the queue."""
    assert take(generator) is None
    put(generator, "a", seed=1)
    assert [generator._looks_first() for _ in range(6)] == [False, True] * 3


def test_idle_hook_is_called_as_soon_as_the_batch_ends(
    generator: Any, plugin: FetchingPlugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hook runs before the server waits for a request, also if a request is queued."""
    n_idle: list[int] = []
    stock = generator._take_queued

    def take_queued(timeout_s: float | None) -> Any:
        n_idle.append(plugin.n_idle)
        return stock(timeout_s)

    monkeypatch.setattr(generator, "_take_queued", take_queued)
    take(generator)
    put(generator, "a")
    assert take(generator, IDLE) == "a"
    assert n_idle[-1] == plugin.n_idle == 1


def test_without_a_plugin_requests_enter_at_once(
    patched_server: ModuleType, generator: Any
) -> None:
    with plugged():
        put(generator, "w1")
        assert take(generator) == "w1"
        assert not generator._admission
