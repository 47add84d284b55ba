"""Requests that wait for a plugin's prefetch: which requests pass them, and which do not."""

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


class Fetched(TakenRequest):
    """A request that can enter when its plugin says so."""

    def __init__(self, plugin: Fetches, text: str, prompt: Prompt) -> None:
        super().__init__(prompt)
        self.plugin, self.text = plugin, text
        self.is_there: Callable[[], bool] | None = None

    def advance(self) -> bool:
        if self.is_there is None:
            self.plugin.begun.append(self.text)
            self.is_there = self.plugin.is_there(self.text)
        return self.is_there()


class Fetches:
    """Fetches for every prompt that begins with "w", until the test says that it is in RAM."""

    def __init__(self) -> None:
        self.there: set[str] = set()
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
    def take_request(self, request: ClientRequest, prompt: Prompt) -> Fetched:
        if request.prompt == "raise":
            raise ValueError("bug")
        return Fetched(self, request.prompt, prompt)

    def is_there(self, prompt: str) -> Callable[[], bool]:
        def there() -> bool:
            if self.failing is not None:
                raise self.failing
            return prompt in self.there or not prompt.startswith("w")

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


def test_ready_requests_pass_those_that_wait(
    generator: Any, fetches: Fetches, caplog: pytest.LogCaptureFixture
) -> None:
    for prompt in ("w1", "a", "w2", "b"):
        put(generator, prompt)
    assert [take(generator) for _ in range(3)] == ["a", "b", None]
    fetches.there |= {"w2"}
    assert [take(generator) for _ in range(2)] == ["w2", None]
    fetches.there |= {"w1"}
    assert [take(generator) for _ in range(2)] == ["w1", None]
    assert fetches.begun == ["w1", "a", "w2", "b"]
    assert "prefetch failed" not in caplog.text


def test_plugins_may_work_while_no_request_is_there(generator: Any, fetches: Fetches) -> None:
    """A request that comes at that time is next."""
    put(generator, "served")
    assert take(generator) == "served" and take(generator) is None
    assert fetches.n_idle == 0
    assert [take(generator, IDLE) for _ in range(3)] == [None] * 3
    assert fetches.n_idle == 4  # the first when the reply had ended
    put(generator, "next")
    assert take(generator, IDLE) == "next" and fetches.n_idle == 4
    assert take(generator, IDLE) is None and fetches.n_idle == 6


class Works:
    """A plugin's answers to `prefetch` that take time: `n_calls` calls of `seconds` each."""

    def __init__(self, fetches: Fetches, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = clock
        self.asked: list[str] = []
        self.seconds: dict[str, float] = {}
        self.n_calls: dict[str, int] = {}
        monkeypatch.setattr(fetches, "is_there", self.is_there)

    def is_there(self, prompt: str) -> Callable[[], bool]:
        def works() -> bool:
            self.asked.append(prompt)
            self.clock.sleep(self.seconds.get(prompt, 0.0))
            return self.asked.count(prompt) >= self.n_calls.get(prompt, 1)

        return works


@pytest.fixture
def speaking(generator: Any) -> Any:
    """A reply that has begun: it waits for entering requests, GAP_S at most."""
    reply = SimpleNamespace(has_begun=True, is_over=False, is_stopped=False)
    generator._replies.append(reply)
    return reply


@pytest.fixture
def works(fetches: Fetches, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Works:
    return Works(fetches, clock, monkeypatch)


def test_between_two_steps_one_that_waits_does_some_work(
    generator: Any, works: Works, speaking: Any
) -> None:
    works.seconds["w2"] = 2 * WORK_S
    works.n_calls = dict.fromkeys(("w1", "w2", "w3"), 9)
    for prompt in ("w1", "w2", "w3"):
        put(generator, prompt)
    assert take(generator) is None
    works.asked.clear()
    assert not generator._is_asked() and works.asked == ["w1", "w2"]
    assert not generator._is_asked() and works.asked == ["w1", "w2", "w1", "w2"]


def test_one_that_is_ready_enters_before_others_are_worked_on(
    generator: Any, works: Works, speaking: Any
) -> None:
    works.n_calls = {"w1": 2, "w2": 9}
    put(generator, "w1")
    put(generator, "w2")
    assert take(generator) is None and generator._is_asked()
    works.asked.clear()
    assert generator._is_asked() and not works.asked
    assert take(generator) == "w1"


def test_a_small_restore_passes_a_large_one_which_gets_on_all_the_same(
    generator: Any, works: Works, speaking: Any
) -> None:
    works.seconds = {"w1": LARGE_S / 4, "w2": 2 * WORK_S}
    works.n_calls = {"w1": 99, "w2": 9}
    put(generator, "w1")
    put(generator, "w2")
    for _ in range(40):
        if generator._is_asked() and take(generator) == "w2":
            break
    else:
        take(generator)
        pytest.fail(f"w2 still waits after {works.asked}")
    # The first is not passed until it proves to be large; then it works in every third pause.
    assert 6 <= works.asked.count("w1") < 12


def test_a_gone_client_is_not_worked_for(generator: Any, works: Works) -> None:
    works.n_calls["w1"] = 99
    request = put(generator, "w1")
    assert take(generator) is None
    ClientRequest.of(request).client_gone = True
    works.asked.clear()
    assert generator._is_asked() and not works.asked
    assert take(generator) is None and not generator._admission


def test_where_nobody_waits_the_replies_go_on() -> None:
    assert not AdmissionQueue().step_ended()


@pytest.mark.parametrize(("n_restores", "n_short"), [(0, 12), (12, 0), (8, 8)])
def test_many_that_come_at_once_let_the_replies_go_on(
    generator: Any,
    works: Works,
    monkeypatch: pytest.MonkeyPatch,
    speaking: Any,
    n_restores: int,
    n_short: int,
) -> None:
    """They take GAP_S plus the time of one of them, then the replies have a step; all enter."""
    begun: list[Any] = []
    render = generator._rendered

    def rendered(*args: Any) -> Any:
        begun.append(args)
        works.clock.sleep(GAP_S / 2)
        return render(*args)

    monkeypatch.setattr(generator, "_rendered", rendered)
    names = [f"w{n}" for n in range(n_restores)] + [f"a{n}" for n in range(n_short)]
    works.seconds = dict.fromkeys(names, GAP_S / 2)
    works.n_calls = dict.fromkeys(names, 2)
    for name in names:
        put(generator, name)
    entered: list[str] = []
    most = n_before = 0
    while len(entered) < len(names):
        while (entering := take(generator)) is not None:
            entered.append(entering)
        while not generator._looks_first():
            most, n_before = max(most, len(begun) - n_before), len(begun)
            if len(entered) == len(names):
                break
    assert sorted(entered) == sorted(names)
    assert most <= 3, "each takes half of GAP_S or more to begin"


def test_all_that_came_together_enter_before_the_first_step_also_of_a_later_batch(
    generator: Any, works: Works
) -> None:
    """The earlier batch does not count: its last step may have ended long ago."""
    for batch in range(2):
        names = [f"a{batch}{n}" for n in range(4)]
        for name in names:
            put(generator, name)
        assert generator._next_request(IDLE)[1].prompt == names[0]
        assert [take(generator) for _ in names] == [*names[1:], None]
        assert not generator._is_asked()
        assert generator._next_request(IDLE) is None  # the batch has ended
        works.clock.advance(100.0)


def test_before_the_first_reply_all_restore_that_can_and_are_computed_together(
    generator: Any, works: Works
) -> None:
    names = ["w1", "w2", "w3"]
    works.seconds, works.n_calls = dict.fromkeys(names, 2 * WORK_S), dict.fromkeys(names, 4)
    works.n_calls["s"] = 10**9  # it waits for something that its own work does not bring
    for name in ["w1", "s", "w2", "w3"]:
        put(generator, name)
    assert [take(generator) for _ in range(4)] == [*names, None]
    assert works.asked.count("s") < 20


def test_one_that_is_ready_just_after_the_gap_enters_all_the_same(
    generator: Any, works: Works
) -> None:
    works.seconds, works.n_calls = {"w1": 0.4 * QUIET_GAP_S}, {"w1": 3}
    put(generator, "w1")
    assert take(generator) == "w1" and works.asked == ["w1"] * 3


class Looks:
    """The server's looks for a request that is on its way; it waits before each look."""

    def __init__(self, generator: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n = 0
        self.then: Callable[[], object] = lambda: None
        """Called in each wait."""
        self._get, self._clock = generator.requests.get, clock
        monkeypatch.setattr(generator.requests, "get", self.get)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if timeout:
            self.n += 1
            self.then()
            self._clock.sleep(timeout)
        return self._get(False)


@pytest.fixture
def looks(generator: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(generator, clock, monkeypatch)


def test_the_first_waits_for_one_whose_thread_is_about_to_queue_it(
    generator: Any, clock: Clock, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(generator, "a1")
    monkeypatch.setitem(ARRIVING, threading.get_ident(), clock.perf_counter())
    looks.then = lambda: put(generator, "a2") if looks.n == 3 else None
    assert [take(generator) for _ in range(3)] == ["a1", "a2", None]
    assert looks.n == 3 and not ARRIVING


def test_nobody_waits_for_one_that_is_not_queued_or_takes_long(
    generator: Any, clock: Clock, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its body may be long, or it may not ask for a reply."""
    monkeypatch.setitem(ARRIVING, 1, clock.perf_counter())
    looks.then = lambda: ARRIVING.clear() if looks.n == 3 else None
    put(generator, "a1")
    assert [take(generator) for _ in range(2)] == ["a1", None]
    assert looks.n == 3
    began_s = clock.perf_counter()
    monkeypatch.setitem(ARRIVING, 1, began_s)
    looks.then = lambda: None
    generator._set_serving(False)
    generator._set_serving(True)
    assert take(generator) is None
    assert began_s < clock.perf_counter() < began_s + QUIET_GAP_S
    n_before = looks.n
    generator._set_serving(False)
    generator._set_serving(True)
    assert take(generator) is None and looks.n == n_before


def test_one_that_restores_for_long_is_left_behind_before_the_first_reply(
    generator: Any, works: Works
) -> None:
    works.seconds, works.n_calls = {"w1": QUIET_GAP_S / 5}, {"w1": 10**9, "w2": 2}
    put(generator, "w1")
    put(generator, "w2")
    assert take(generator) is None  # a step may be made
    assert 2 < works.asked.count("w1") < 10
    entered = [take(generator) for _ in range(9)]
    assert entered.count("w2") == 1 and set(entered) == {"w2", None}


def test_ended_replies_are_forgotten_where_nothing_is_batched(generator: Any) -> None:
    before = len(generator._replies)
    for _ in range(20):
        put(generator, "s", seed=1)
        reply = generator._next_request(IDLE)[0]
        reply._queue = SimpleNamespace(put=lambda item: None)
        reply.put(SimpleNamespace(stop=lambda: None))
        reply.put(None)
    assert len(generator._replies) <= before + 1


def test_a_reply_that_its_own_thread_stopped_is_told_once(generator: Any) -> None:
    """Otherwise every step of the replies would end the batch's time."""
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


def test_a_prompt_that_was_made_ahead_is_made_again_for_another_tokenizer(
    generator: Any, chat: Any
) -> None:
    """Rendering changes messages; mlx-lm 0.31.3 fails on messages that it has changed."""

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


def test_a_prompt_that_cannot_be_made_ahead_says_why_when_it_enters(
    generator: Any, chat: Any
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("the template's own reason")

    tokenizer = generator.model_provider.tokenizer
    tokenizer.apply_chat_template = fail
    before = copy.deepcopy(chat.messages)
    generator._render_ahead(chat, chat_args())
    assert chat.messages == before
    with pytest.raises(RequestRefused, match="the template's own reason"):
        generator._tokenize(tokenizer, chat, chat_args())


def test_nothing_is_made_ahead_while_a_model_is_loaded(generator: Any, chat: Any) -> None:
    generator.model_provider.is_loading = True
    generator._render_ahead(chat, chat_args())
    assert not hasattr(chat, "rendered")


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
    # No request passes this one, which would wait for ever on a busy server.
    assert fetches.begun == ["w1"]
    fetches.there |= {"w1"}
    assert [take(generator) for _ in range(2)] == ["w1", "image"]
    assert fetches.begun == ["w1"], "the next model's tokenizer is not loaded yet"


def test_a_waiting_request_is_tokenized_once(generator: Any, fetches: Fetches) -> None:
    request = put(generator, "w1")
    request.request_type, request.role_mapping = "chat", None
    request.tools, request.messages = None, [{"role": "user", "content": "x"}]
    assert generator._next_request() is None
    fetches.there |= {"w1"}
    queued = generator._next_request()
    generator._tokenize(TOKENIZER, request, queued[2])
    assert fetches.n_prepared == 1
    generator._tokenize(TOKENIZER, request, queued[2])
    assert fetches.n_prepared == 2


def test_what_a_plugin_takes_knows_where_its_tokens_go(generator: Any) -> None:
    """The batch generator needs this to notice that a client left, and to send it errors."""

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


def test_a_model_that_was_loaded_meanwhile_tokenizes_itself(
    generator: Any, fetches: Fetches
) -> None:
    request = put(generator, "w1")
    assert generator._next_request() is None
    queued = generator._next_request(IDLE)
    other = SimpleNamespace(has_chat_template=False, encode=lambda text: [1, 2, 3])
    assert generator._tokenize(other, request, queued[2])[0] == [1, 2, 3]


def test_a_refused_request_is_handed_on_to_be_refused(generator: Any, fetches: Fetches) -> None:
    request = put(generator, "refuse")
    request.request_type = "chat"
    queued = generator._next_request()
    with pytest.raises(RequestRefused, match="refused"):
        generator._tokenize(TOKENIZER, request, queued[2])
    assert fetches.n_prepared == 1


def test_a_hook_that_fails_holds_nothing(
    generator: Any, fetches: Fetches, caplog: pytest.LogCaptureFixture
) -> None:
    put(generator, "raise")
    assert take(generator) == "raise"
    put(generator, "w1")
    assert take(generator) is None
    fetches.failing = ValueError("bug")
    assert take(generator) == "w1"
    assert "failed in hook take_request" in caplog.text


@pytest.mark.parametrize("messages", [["hi"], [None], "hi", 5, [{"content": [None]}]])
def test_a_malformed_request_is_its_clients_and_ends_no_thread(
    generator: Any, messages: Any
) -> None:
    """mlx-lm 0.31.3 and 0.32.0 queue what 0.32.2 refuses; nothing catches what is raised here."""
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
    while not generator._looks_first():
        n_steps += 1
        if n_steps == 3:
            fetches.there |= {"w1"}
    assert n_steps == 3
    assert take(generator) == "w1"


def test_a_server_is_healthy_while_it_can_answer(generator: Any) -> None:
    found = []
    for is_ready in (True, False):
        generator.model_provider.is_ready = is_ready
        found.append(generator.is_healthy)
    assert found == [True, False]
    generator.model_provider.is_ready = True
    generator.requests.refusal = ValueError("the server ends")
    assert generator.is_healthy is False


def test_between_two_steps_is_asked_once(generator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []
    monkeypatch.setattr(generator, "_is_asked", lambda: asked.append(None))
    for _ in range(3):
        assert take(generator) is None
    assert [generator._looks_first() for _ in range(3)] == [False, None, None]
    assert len(asked) == 2


def test_a_batch_that_no_request_can_join_makes_steps(generator: Any) -> None:
    """Stock does not look for requests then, and the queued request stays."""
    assert take(generator) is None
    put(generator, "a", seed=1)
    assert [generator._looks_first() for _ in range(6)] == [False, True] * 3


def test_plugins_know_at_once_that_nothing_is_served_any_more(
    generator: Any, fetches: Fetches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the server waits for a request, and also if a request is queued."""
    n_idle: list[int] = []
    stock = generator._take_queued

    def take_queued(timeout_s: float | None) -> Any:
        n_idle.append(fetches.n_idle)
        return stock(timeout_s)

    monkeypatch.setattr(generator, "_take_queued", take_queued)
    take(generator)
    put(generator, "a")
    assert take(generator, IDLE) == "a"
    assert n_idle[-1] == fetches.n_idle == 1


def test_without_a_plugin_that_fetches_stocks_queue_is_all(
    patched_server: ModuleType, generator: Any
) -> None:
    with plugged():
        put(generator, "w1")
        assert take(generator) == "w1"
        assert not generator._admission
