"""Probes of the patches: each probe runs the server's own code and checks the result.

A probe runs before the server listens. It has a separate plugin manager, so that real plugins do
not see the probe's models and requests. A probe raises PatchNotEffective on an unpatched server.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import logging
import socket
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from email.message import Message
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx

from ...errors import PatchNotEffective
from .. import hooks, manager
from ..hooks import hookimpl
from ..manager import Taken, TakenTokens
from ..scheduling import prompt_lookup
from ..scheduling.batch_generator import row_of
from ..scheduling.model_provider import PluginCaches, WiredLimit

ARGS = Namespace(
    **dict.fromkeys(("adapter_path", "draft_model", "prompt_cache_bytes", "kv_bits")),
    **dict.fromkeys(("pipeline", "trust_remote_code", "use_default_chat_template"), False),
    **dict.fromkeys(("num_draft_tokens", "temp", "top_k", "min_p"), 0),
    model="probe",
    chat_template="",
    chat_template_args={},
    allowed_origins=["*"],
    max_tokens=4,
    top_p=1.0,
    prompt_cache_size=10,
)
"""The options that the server's objects read, on every supported version."""

_LOGITS, _SAMPLING = SimpleNamespace(logit_bias=None), SimpleNamespace(top_k=0)
GENERATION_ARGS = SimpleNamespace(
    model="probe", seed=None, top_logprobs=0, logits=_LOGITS, sampling=_SAMPLING
)


class ProbeCache:
    """A cache that mlx-lm can batch; `by`: the code that merged it."""

    nbytes = 0
    state = ()

    def __init__(self, by: str = "") -> None:
        self.by = by

    def is_trimmable(self) -> bool:
        return False

    def merge(self, caches: Sequence[Any]) -> ProbeCache:
        return ProbeCache("merged by the cache")

    def extend(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, for all operations on a batch's caches."""

    extract = filter = prepare = finalize = extend


class ProbeRequest(hooks.TakenRequest):
    """Feeds the model one more token than the prompt has."""

    def __init__(self, plugin: ProbePlugin, prompt: hooks.Prompt) -> None:
        super().__init__(prompt)
        self.plugin = plugin

    def enter(self) -> hooks.Prepared:
        ids = self.prompt.ids
        longer = hooks.Prompt([*ids, 0], [ids, [0]], ["user", "user"])
        return hooks.Prepared(longer, [ProbeCache()], len(ids))

    def insert(self, tokens: Sequence[int], caches: list[Any], cache_type: str) -> None:
        self.plugin.asked.append(f"insert {list(tokens)} {cache_type}")


class ProbePlugin:
    """Answers hooks. Most methods record their call in `asked`."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    @hookimpl
    def add_options(self, parser: ArgumentParser) -> None:
        parser.add_argument("--probe-option", type=int)

    @hookimpl
    def configure(self) -> None:
        self.asked.append("configure")

    @hookimpl
    def shutdown(self) -> None:
        self.asked.append("shutdown")

    @hookimpl
    def wired_limit(self, asked_bytes: int) -> int:
        self.asked.append(f"wired_limit {asked_bytes}")
        return asked_bytes - 1

    @hookimpl
    def model_loaded(self) -> hooks.ModelSupport:
        self.asked.append("model_loaded")
        return hooks.ModelSupport(
            lambda: [ProbeCache(), ProbeCache()],
            lambda caches: ProbeCache(f"{len(caches)} merged by the plugin"),
            limits=hooks.PrefillLimits(1.0, lambda position: 2),
        )

    @hookimpl
    def request_received(self, headers: Message, body: dict[str, Any]) -> None:
        self.asked.append(f"request_received {body['prompt']} {headers['X-Probe']}")

    @hookimpl
    def prepare_messages(self, messages: list[dict[str, Any]]) -> None:
        messages[0]["content"] += "!"

    @hookimpl
    def take_request(self, request: hooks.ClientRequest, prompt: hooks.Prompt) -> ProbeRequest:
        self.asked.append(f"take_request {request.kind} {request.prompt}")
        return ProbeRequest(self, prompt)

    @hookimpl
    def response_headers(self) -> list[tuple[str, str]]:
        return [("X-Probe-Reply", "yes")]

    @hookimpl
    def reply_sent(self, content: str) -> None:
        self.asked.append(f"reply_sent {content}")

    @hookimpl
    def routes(self) -> list[hooks.Route]:
        return [hooks.Route("GET", "/probe", lambda handler: handler.send_error(418))]


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value inside the block. `unittest.mock` is slow to import."""
    is_own, original = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        if is_own:
            setattr(owner, name, original)


@contextlib.contextmanager
def probing() -> Iterator[ProbePlugin]:
    """Make a ProbePlugin the only plugin inside the block; the host logs nothing there."""
    plugins, plugin = manager.PluginManager(), ProbePlugin()
    plugins.register(plugin, name="probe")
    logging_was_disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            manager.using(plugins),
            warnings.catch_warnings(),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield plugin
    finally:
        logging.disable(logging_was_disabled)


def expect(what: str, actual: Any, expected: Any) -> None:
    """Raise PatchNotEffective unless the probe saw what it expected."""
    if actual != expected:
        raise PatchNotEffective(f"{what}: found {actual!r}, expected {expected!r}")


def options_reach_plugins(server: ModuleType) -> None:
    with probing():
        parser = server.argparse.ArgumentParser(description="probe")
        parser.add_argument("--stock", type=int)
        line = "--stock 1 --plugin a --plugin=b --probe-option 2"
        args, unknown = parser.parse_known_args(line.split())
    expect("unknown options", unknown, [])
    expect("options", (args.stock, args.plugin, args.probe_option), (1, ["a", "b"], 2))


def loaded_models_make_plugin_caches(server: ModuleType) -> None:

    def load(*args: Any, return_config: bool = False, **kwargs: Any) -> tuple[Any, ...]:
        model, tokenizer = ProbeModel(), SimpleNamespace(chat_template=None)
        return (model, tokenizer, {}) if return_config else (model, tokenizer)

    limits: list[int] = []
    with (
        probing() as plugin,
        replaced(server, "load", load),
        replaced(mx, "set_wired_limit", limit := WiredLimit(limits.append)),
    ):
        limit(8)
        provider = server.ModelProvider(ARGS)
        provider.load_default()
        caches = server.make_prompt_cache(provider.model)
    expect("hooks asked", plugin.asked, ["wired_limit 8", "model_loaded"])
    expect("limits of wired memory", limits, [7])
    expect("caches of the model", [type(cache) for cache in caches], [ProbeCache, ProbeCache])
    expect("whether the model is batched", provider.is_batchable, True)


class ProbeModel:
    """A model that computes nothing. Its own two caches cannot be batched."""

    layers = (None, None)

    def __init__(self) -> None:
        self.computed: list[list[list[int]]] = []

    def make_cache(self) -> list[object]:
        return [object(), object()]

    def __call__(self, ids: Any, cache: Any) -> None:
        self.computed.append(ids.tolist())


def requests_pass_plugins(server: ModuleType) -> None:
    tokenizer = SimpleNamespace(has_chat_template=False)
    tokenizer.encode = lambda text: [ord(char) for char in text if char in "px!"]
    provider = SimpleNamespace(cli_args=ARGS, tokenizer=tokenizer, processor=None, max_context=None)
    provider.reads_images, provider.is_batchable = False, True
    with probing() as plugin, replaced(server.ResponseGenerator, "_generate", lambda self: None):
        generator = server.ResponseGenerator(provider, None)
        generator.join()
        chat = [{"role": "user", "content": "x"}]
        request = server.CompletionRequest("chat", "", chat, None, {"user": ""})
        text_request = server.CompletionRequest("text", "p", [], None, None)
        for client_request in (request, text_request):
            generator.requests.put((Queue(), client_request, GENERATION_ARGS))
        _, request, args = generator._next_request(0.1)
        joined, none = generator._next_request(), generator._next_request()
        ids, segments, types, *_ = generator._tokenize(tokenizer, request, args)
    prompt = list(b"x!")
    expect("prompt", (ids, segments, types), ([*prompt, 0], [prompt, [0]], ["user", "user"]))
    expect("plugin that took the request", ids[:].taken.plugin, "probe")
    expect("requests that join", (joined and joined[1], none), (text_request, None))
    expect("hooks asked", plugin.asked, ["take_request text p", "take_request chat "])


def taken(plugin: ProbePlugin, ids: list[int]) -> Taken:
    """Return a request that the probe's plugin took; it entered with the prompt `ids`."""
    prompt = hooks.Prompt(ids, [ids], ["user"])
    return Taken("probe", ProbeRequest(plugin, prompt), prompt=prompt)


def prompt_cache_asks_plugins(server: ModuleType) -> None:
    """The cache that `run` makes returns a plugin's caches, and calls the plugin's `insert`."""
    prompt_caches: list[Any] = []
    with (
        probing() as plugin,
        replaced(server, "ResponseGenerator", lambda provider, cache: prompt_caches.append(cache)),
        replaced(server, "_run_http_server", lambda *args, **kwargs: None),
    ):
        plugin_request = taken(plugin, [1])
        plugin_request.enter()
        inspect.unwrap(server.run)("127.0.0.1", 0, SimpleNamespace(cli_args=ARGS))
        (cache,) = prompt_caches
        fetched, rest = cache.fetch_nearest_cache("model", TakenTokens([1, 2], plugin_request))
        tokens = TakenTokens([1], plugin_request)
        cache.insert_cache("model", tokens, [ProbeCache()], cache_type="user")
    expect("fetched", ([type(c) for c in fetched or []], rest), ([ProbeCache], [2]))
    expect("hooks asked", plugin.asked, ["insert [1] user"])
    expect("sequences kept by stock", len(cache), 0)


def single_prompts_are_saved(server: ModuleType) -> None:
    """A prompt that is served alone is computed and saved before mlx-lm gets its last token."""
    with probing() as plugin:
        model: Any = ProbeModel()
        model.make_cache = PluginCaches(model, "probe", plugin.model_loaded())
        replies = server.stream_generate(
            model=model,
            tokenizer=None,
            prompt=TakenTokens([1, 2], taken(plugin, [1, 2])),
            prompt_cache=[],
            prompt_progress_callback=lambda n_done, n_tokens: None,
            prefill_step_size=8,
        )
        with contextlib.suppress(Exception):  # stock fails, because it has no tokenizer
            next(replies)
    expect("tokens computed before stock's", model.computed, [[[1]]])
    expect("hooks asked", plugin.asked, ["model_loaded", "insert [1] user"])


def prompts_are_computed_in_turns(server: ModuleType) -> None:
    """A batch generator has a plugin's caches, and computes the shorter of two prompts first."""
    with probing() as plugin:
        model: Any = ProbeModel()
        model.make_cache = PluginCaches(model, "probe", plugin.model_loaded())
        sizes = {"completion_batch_size": 2, "prefill_batch_size": 4, "prefill_step_size": 8}
        stream = mx.default_stream(mx.default_device())
        generator = server.BatchGenerator(model, **sizes, stream=stream)
        caches = [[ProbeCache()], [ProbeCache()]]
        try:
            generator.insert_segments(segments=[[[5, 6, 7, 8]], [[3, 4]]], caches=caches)
            responses, _ = generator.next()
        finally:
            generator.close()
    expect("tokens computed by the first step", model.computed, [[[3]]])
    batches = [prefill.batch for prefill in generator.prefills.all]
    merged = [cache.by for batch in batches for cache in batch.prompt_cache]
    expect("batch caches", merged, ["1 merged by the plugin"] * 2)
    expect("progress of the first step", [response.progress for response in responses], [(1, 2)])


def next_id(ids: mx.array, cache: Any) -> mx.array:
    """A model that counts from 0 to 7: the likeliest token is the next id.

    It indexes no array by another: on a GPU's first start, MLX would compile kernels for this.
    """
    return (mx.arange(8) == (ids[..., None] + 1) % 8).astype(mx.float32)


def drafts_are_checked(server: ModuleType) -> None:
    """A step of a single reply checks a right and a wrong draft, and keeps the right draft."""
    generate: Any = importlib.import_module("mlx_lm.generate")
    batch = generate.PromptProcessingBatch(next_id, [0], [[]], max_tokens=[8]).generate([[1]])
    tokens = [response.token for response in prompt_lookup.checked(batch, [2, 3, 5])]
    tokens += [response.token for response in batch.next()]
    expect("tokens of two steps", tokens, [2, 3, 4])


def rows_are_parked(server: ModuleType) -> None:
    """One of two replies is taken out of their batch; neither changes the other's lists."""
    generate: Any = importlib.import_module("mlx_lm.generate")
    own = {"samplers": [None] * 2, "logits_processors": [[], []], "max_tokens": [8, 8]}
    batch = generate.PromptProcessingBatch(next_id, [0, 1], [[], []], **own).generate([[1], [4]])
    batch.next()
    lists = lists_of(batch)
    row = row_of(batch, 0)
    expect("lists of the batch", lists_of(batch), lists)
    lists = lists_of(row)
    batch.filter([1])
    batch.next()
    expect("lists of the parked reply", lists_of(row), lists)
    expect("uids of the parked and of the other reply", (row.uids, batch.uids), ([0], [1]))


def lists_of(batch: Any) -> dict[str, list[Any]]:
    return {name: list(value) for name, value in vars(batch).items() if isinstance(value, list)}


def windows_are_in_order(server: ModuleType) -> None:
    """A window's tokens can be read in order after they were appended one at a time."""
    caches = importlib.import_module("mlx_lm.models.cache")
    window, ring = caches.BatchRotatingKVCache(3, [0]), caches.RotatingKVCache(3)
    for n in range(5):
        token = mx.full((1, 1, 1, 1), n)
        keys, _ = window._update_concat(token, token)
        ring.update_and_fetch(token, token)
    in_order = [side.flatten().tolist() for side in (keys, ring._temporal_order(ring.keys))]
    expect("tokens, and the position of the next", (in_order, ring._idx), ([[2, 3, 4]] * 2, 2))


def batches_follow_plugins(server: ModuleType) -> None:
    prompts_are_computed_in_turns(server)
    drafts_are_checked(server)
    rows_are_parked(server)
    windows_are_in_order(server)


class ProbeKeys(tuple[Any, ...]):
    """Packed keys with their own attention function, which returns its arguments."""

    def attend(self, *arguments: Any) -> tuple[Any, ...]:
        return arguments


def packed_keys_attend_themselves(base: ModuleType) -> None:
    queries = mx.ones((1, 2, 1, 32))
    packed = mx.quantize(mx.ones((1, 1, 3, 32)), group_size=32, bits=4)
    cache = SimpleNamespace(bits=4, group_size=32)
    attended = base.scaled_dot_product_attention(
        queries, ProbeKeys(packed), packed, cache=cache, scale=0.5, mask="causal"
    )
    expect("attention of keys that bring their own", type(attended), tuple)
    expect("its arguments", attended == (queries, packed, 0.5, "causal"), True)


def wired_memory_is_chosen(mlx: ModuleType) -> None:
    """A batch and a stream set limits; MLX gets a limit only when a plugin chooses it."""
    generate: Any = importlib.import_module("mlx_lm.generate")
    expect("function that sets the limit", type(mlx.set_wired_limit), WiredLimit)
    limits: list[int] = []
    passed_on: list[int] = []
    info = {"max_recommended_working_set_size": 8, "memory_size": 9}
    with (
        replaced(mlx, "set_wired_limit", limit := WiredLimit(passed_on.append)),
        replaced(mlx, "device_info", lambda *device: info),
        replaced(mlx.metal, "is_available", lambda: True),
    ):
        batch = generate.BatchGenerator(ProbeModel())
        limits.append(limit.asked_bytes)
        batch.close()
        limits.append(limit(2))
        with generate.wired_limit(ProbeModel(), []):
            limits.append(limit.asked_bytes)
        limits.append(limit.asked_bytes)
        expect("limits that MLX gets before one is chosen", passed_on, [])
        for chosen in (1, None):
            limit.choose(chosen)
    expect("limits by batch, its end, stream, its end", limits, [8, 0, 8, 2])
    expect("limits that MLX gets afterwards", passed_on, [1, 2])


def http_reaches_plugins(server: ModuleType) -> None:
    body = json.dumps({"prompt": "ping"}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nX-Probe: 1\r\nContent-Length: %d\r\n\r\n" % len(body)
    with probing() as plugin:
        reply = answer(server, head + body)
        health = answer(server, b"GET /health HTTP/1.1\r\n\r\n")
        route = answer(server, b"GET /probe?a=b HTTP/1.1\r\n\r\n")
    reply_head, _, payload = reply.partition("\r\n\r\n")
    expect("header of the reply", "\r\nX-Probe-Reply: yes" in reply_head, True)
    expect("reply", json.loads(payload)["choices"][0]["text"], "pong")
    expect("hooks asked", plugin.asked, ["request_received ping 1", "reply_sent pong"])
    expect("header of another reply", "X-Probe-Reply" in health, False)
    expect("status of a plugin's path", " 418 " in route.partition("\r\n")[0], True)


def answer(server: ModuleType, request: bytes, **of_generator: Any) -> str:
    """Return what the server writes to one connection, without a port or a model."""
    ours, theirs = socket.socketpair()

    class OneConnection:
        """Stands for http.server's class: it handles one connection and does not listen."""

        def __init__(self, address: Any, make_handler: Any) -> None:
            self.make_handler = make_handler

        def serve_forever(self) -> None:
            self.make_handler(ours, ("127.0.0.1", 0), self)

    # From 0.32.0 on, the context has a state machine; before, each response had a state.
    states = getattr(server, "TextStateMachine", lambda states: None)({"normal": []})
    context = SimpleNamespace(prompt=[1], prompt_cache_count=0, text_sm=states, tool_parser=None)
    context.has_tool_calling = context.has_thinking = False
    context.initial_state, context.stop = "normal", lambda: None
    response = SimpleNamespace(text="pong", token=1, logprob=0.0, finish_reason="length")
    response.top_tokens, response.state, response.match = (), "normal", None
    generator = SimpleNamespace(cli_args=ARGS, is_healthy=True, stop_and_join=lambda: None)
    generator.generate = lambda *args, **kwargs: (context, iter([response]))
    vars(generator).update(of_generator)
    with ours, theirs:
        theirs.sendall(request)
        theirs.shutdown(socket.SHUT_WR)
        server._run_http_server("127.0.0.1", 0, generator, server_class=OneConnection)
        ours.close()
        with theirs.makefile("rb") as reply:
            return reply.read().decode()


def run_starts_and_stops_plugins(server: ModuleType) -> None:
    with (
        probing() as plugin,
        replaced(server, "ResponseGenerator", lambda *args: None),
        replaced(server, "_run_http_server", lambda *_, **__: plugin.asked.append("serve")),
    ):
        server.run("127.0.0.1", 0, SimpleNamespace(cli_args=ARGS))
    expect("order", plugin.asked, ["configure", "serve", "shutdown"])


def buffers_are_read_after_clearing(mlx: ModuleType) -> None:
    """After `clear_cache`, an array of Python numbers can reuse a GPU's buffer, as in mlx-lm."""
    numbers = mlx.random.normal((1 << 16,))
    mlx.eval(numbers)
    mlx.clear_cache()
    del numbers  # the cache gets the buffer, and the next array of this size reuses it
    try:
        mlx.array([0.5] * (1 << 16))
    except RuntimeError as error:
        raise PatchNotEffective(f"a host array cannot take a GPU's buffer: {error}") from error
