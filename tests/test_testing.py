"""The conformance test passes our plugin, and finds the fault of each incorrect plugin."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load

from mlx_lm_kvpersist.errors import ConfigError, PluginFault, RequestRefused
from mlx_lm_kvpersist.host.hooks import (
    ModelSupport,
    PrefillLimits,
    Prepared,
    Prompt,
    Route,
    TakenRequest,
    hookimpl,
)
from mlx_lm_kvpersist.host.patching.patches import PATCH_SET, PATCHES
from mlx_lm_kvpersist.host.patching.probes import ARGS
from mlx_lm_kvpersist.plugin import KVPersistPlugin
from mlx_lm_kvpersist.testing import HOOKS, check_plugin, find_faults

from .host.plugins import Misspelt, WrongArguments


@pytest.fixture(scope="module")
def faults(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The faults found in our own plugin."""
    folder = tmp_path_factory.mktemp("conformance") / "store"
    model, tokenizer = load(str(tiny_model))
    key = str(tiny_model), None, None
    provider = SimpleNamespace(model=model, tokenizer=tokenizer, model_key=key, cli_args=ARGS)
    PATCH_SET.apply([patch for patch in PATCHES if patch.name == "attention"])
    try:
        options = ("--kvpersist-dir", str(folder))
        return find_faults(KVPersistPlugin(), options, provider)
    finally:
        PATCH_SET.undo()


@pytest.mark.parametrize("hook", HOOKS)
def test_our_plugin_conforms(faults: dict[str, str], hook: str) -> None:
    assert hook not in faults, faults[hook]


class Correct:
    """A plugin whose hooks do only allowed things."""

    @hookimpl
    def configure(self, args: Namespace) -> None: ...

    @hookimpl
    def routes(self) -> list[Route]:
        return [Route("GET", "/x/{id}", lambda handler: None)]

    @hookimpl
    def model_loaded(self, provider: Any) -> ModelSupport:
        n_layers = len(provider.model.layers)
        limits = PrefillLimits(0.5, lambda position: 64)
        return ModelSupport(lambda: [KVCache() for _ in range(n_layers)], limits=limits)

    @hookimpl
    def request_received(self, body: Any) -> None:
        if not body["messages"]:
            raise RequestRefused("only chats are served")

    @hookimpl
    def prepare_messages(self, messages: list[Any]) -> None:
        messages[0]["content"] += "!"

    @hookimpl
    def take_request(self, prompt: Prompt) -> TakenRequest:
        return TakenRequest(prompt)

    @hookimpl
    def response_headers(self) -> list[tuple[str, str]]:
        return [("X-A", "b")]


def test_a_correct_plugin_has_no_fault() -> None:
    check_plugin(Correct())


class Answers(TakenRequest):
    """A request whose `enter` and `advance` return given values."""

    def __init__(self, answer: Any = None, ready: Any = True) -> None:
        super().__init__(Prompt([5, 6], [[5, 6]], ["user"]))
        self.answer, self.ready = answer, ready

    def advance(self) -> bool:
        return bool(self.ready)

    def enter(self) -> Any:
        return self.answer


class EditsIds(TakenRequest):
    def insert(self, tokens: Sequence[int], caches: list[Any], cache_type: str) -> None:
        tokens.append(7)  # type: ignore[attr-defined]


def support(*caches: Any, **more: Any) -> ModelSupport:
    return ModelSupport(lambda: list(caches), **more)


def fresh(**more: Any) -> ModelSupport:
    return ModelSupport(lambda: [KVCache(), KVCache()], **more)


def prepared(ids: Any, segments: Any, types: Any, *more: Any) -> Answers:
    return Answers(Prepared(Prompt(ids, segments, types), *more))


COUNT = count()
SHARED = KVCache(), KVCache()
BAD: list[tuple[str, Any]] = [
    ("configure", lambda args: 1 // 0),
    ("routes", lambda: [("GET", "/x")]),
    ("routes", lambda: [Route("get", "/x", print)]),
    ("routes", lambda: [Route("GET", "x", print)]),
    ("routes", lambda: Route("GET", "/x", print)),
    ("model_loaded", lambda provider: [KVCache()]),
    ("model_loaded", lambda provider: support(KVCache())),
    ("model_loaded", lambda provider: support(*SHARED)),
    ("model_loaded", lambda provider: fresh(merge=lambda caches: "batch")),
    ("model_loaded", lambda provider: fresh(merge=lambda caches: caches.pop())),
    ("model_loaded", lambda provider: fresh(limits=0.5)),
    ("model_loaded", lambda provider: fresh(limits=PrefillLimits(0.0, lambda position: 9))),
    ("model_loaded", lambda provider: fresh(limits=PrefillLimits(1.0, lambda position: 0))),
    ("request_received", lambda request: request.messages.clear()),
    ("request_received", lambda headers: headers.__delitem__("X-Session-ID")),
    ("request_received", lambda body: body.pop("stream")),
    ("prepare_messages", lambda messages: messages.append("text")),
    ("prepare_messages", lambda messages: messages[1]["content"].append(None)),
    ("prepare_messages", lambda messages: messages[0].update(content=str(next(COUNT)))),
    ("take_request", lambda prompt: prompt),
    ("take_request", lambda prompt: prompt.ids.append(1)),
    ("take_request", lambda prompt: prompt.segments[0].clear()),
    ("take_request", lambda prompt: prompt.messages[0].update(role="user")),
    ("take_request", lambda prompt: EditsIds(prompt)),
    ("take_request", lambda: Answers(ready=False)),
    ("take_request", lambda: Answers("prompt")),
    ("take_request", lambda: prepared([], [], [])),
    ("take_request", lambda: prepared([1, 2], [[1], [3]], ["system", "user"])),
    ("take_request", lambda: prepared([1, 2], [[1, 2], []], ["system", "user"])),
    ("take_request", lambda: prepared([1, 2], [[1, 2]], [])),
    ("take_request", lambda: prepared([1, "2"], [[1, "2"]], ["user"])),
    ("take_request", lambda: prepared([1, 2], [[1, 2]], ["user"], [KVCache()], 2)),
    ("take_request", lambda: prepared([1, 2], [[1, 2]], ["user"], None, 1)),
    ("take_request", lambda: prepared([1, 2], [[1, 2]], ["user"], [KVCache()], 0)),
    ("response_headers", lambda: {"X-A": "b"}),
    ("response_headers", lambda: [("X-A", 5)]),
    ("response_headers", lambda: [("X-A", "a\r\nB: c")]),
    ("reply_sent", lambda tool_calls: tool_calls[0].clear()),
    ("reply_timed", lambda times_s: times_s.sort()),
    ("shutdown", lambda: 1 // 0),
]


@pytest.mark.parametrize(
    ("hook", "function"), BAD, ids=[f"{n}-{hook}" for n, (hook, _) in enumerate(BAD)]
)
def test_a_fault_is_reported_for_the_hook_that_has_it(hook: str, function: Any) -> None:
    plugin = SimpleNamespace(**{hook: hookimpl(function)})
    assert list(find_faults(plugin)) == [hook]
    with pytest.raises(PluginFault, match=f"^{hook}: "):
        check_plugin(plugin)


@pytest.mark.parametrize("plugin", [Misspelt(), WrongArguments()])
def test_misspelt_hooks_and_wrong_arguments_are_refused(plugin: Any) -> None:
    with pytest.raises(pluggy.PluginValidationError):
        find_faults(plugin)


def test_a_config_error_is_a_fault_of_configure() -> None:
    def refuse(args: Namespace) -> None:
        raise ConfigError("found a bad option")

    plugin = SimpleNamespace(configure=hookimpl(refuse))
    assert find_faults(plugin) == {"configure": "failed: ConfigError: found a bad option"}
