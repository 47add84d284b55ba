"""A conformance test for plugins of the server: docs/plugins.md shows its use.

Every hook that a plugin implements is asked as the server would ask it, from the options to the
end, in one thread. Faults are collected by the name of the hook.
"""

from __future__ import annotations

import copy
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from email.message import Message
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pluggy
from mlx_lm.models.cache import make_prompt_cache

from .errors import PluginFault, RequestRefused
from .host import hookspecs, manager
from .host.answers import (
    CHECKS,
    PREFILL,
    ClientRequest,
    FrozenHeaders,
    Prompt,
    check_batch,
    check_caches,
    check_prepared,
    expect,
    frozen,
)
from .round_trip import tiny_model

HOOKS = tuple(
    name for name, value in vars(hookspecs).items() if hasattr(value, "mlx_lm.server_spec")
)
"""The names of all hooks, in the order in which the server asks them."""

_MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "How far is it?"}]},
    {"role": "assistant", "content": "Far."},
    {"role": "user", "content": "And then?"},
]
_TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
_CALLS = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
_IDS = list(range(3, 43))
_MOST_WAITS = 10_000


def check_plugin(plugin: Any, options: Sequence[str] = (), provider: Any = None) -> None:
    """Raise PluginFault with all that `find_faults` finds."""
    if faults := find_faults(plugin, options, provider):
        raise PluginFault("\n".join(f"{hook}: {fault}" for hook, fault in faults.items()))


def find_faults(plugin: Any, options: Sequence[str] = (), provider: Any = None) -> dict[str, str]:
    """Ask every hook of a plugin; return what is wrong, by the name of the hook.

    options: command line options of the plugin. provider: has `model`, `tokenizer` and `model_key`
    as mlx-lm's ModelProvider, a tiny model without files if it is None. Raises
    pluggy.PluginValidationError for a hook, or an argument of one, that the server does not have.
    """
    plugins = pluggy.PluginManager(hookspecs.PROJECT)  # a manager of the server catches errors
    plugins.add_hookspecs(hookspecs)
    plugins.register(plugin, name="tested")
    plugins.check_pending()
    tested = _Tested(plugins)
    with manager.using(plugins):
        tested.run(options, provider or tiny_provider())
    return tested.faults


class _Tested:
    """One plugin, while its hooks are asked."""

    def __init__(self, plugins: Any) -> None:
        self._plugins = plugins
        self._make_caches: Callable[[], Sequence[Any]] = list
        self.faults: dict[str, str] = {}

    def run(self, options: Sequence[str], provider: Any) -> None:
        parser = ArgumentParser()
        self.ask("add_options", parser=parser)
        args = parser.parse_args(options, copy.copy(provider.cli_args))
        self.ask("configure", args=args)
        self.ask("self_test")
        self.ask("routes")
        self.ask("started", serve=lambda work: None)
        self._make_caches = partial(make_prompt_cache, provider.model)
        self.ask("wired_limit", provider=provider, asked_bytes=1 << 34)
        support = self.ask("model_loaded", provider=provider)
        if support is not None:
            self.guard("model_loaded", partial(self._compute, support, provider.model))
        self.ask("serving_changed", serving=True)
        for kind in ("chat", "text"):
            self._request(kind, provider.model)
        self.ask("serving_changed", serving=False)
        self.ask("idle")
        self.ask("shutdown")

    def ask(self, hook: str, refuses: tuple[type[Exception], ...] = (), **given: Any) -> Any:
        """Ask a hook, and check its answer; None if there is none, or a fault."""
        answer = None
        for implementation in getattr(self._plugins.hook, hook).get_hookimpls():
            arguments = {name: given[name] for name in implementation.argnames}
            answer = self.guard(hook, partial(implementation.function, **arguments))
        if answer is not None and hook in CHECKS:
            self.guard(hook, partial(CHECKS[hook], answer))
        return None if hook in self.faults else answer

    def guard(self, hook: str, act: Callable[[], Any]) -> Any:
        """Return what a function returns; note the hook's first fault."""
        try:
            return act()
        except RequestRefused as error:
            if hook not in ("request_received", "prepare_messages"):
                self.faults.setdefault(hook, f"refused the request: {error}")
        except Exception as error:
            is_answer = isinstance(error, PluginFault)
            fault = str(error) if is_answer else f"failed: {type(error).__name__}: {error}"
            self.faults.setdefault(hook, fault)
        return None

    def _compute(self, support: Any, model: Any) -> None:
        """Run two sequences of a model through the caches of a `ModelSupport`, and merge them."""
        self._make_caches = support.make_caches
        rows = []
        for ids in (_IDS, _IDS[:7]):
            caches = support.make_caches()
            check_caches(caches, len(model.layers))
            logits = model(mx.array([ids]), cache=list(caches))
            is_finite = bool(mx.isfinite(logits).all())
            expect(is_finite, "caches with which logits are not finite", "any")
            rows.append(caches)
        is_new = all(first is not second for first, second in zip(*rows, strict=True))
        expect(is_new, "the caches of another sequence", "new ones")
        for layer in zip(*rows, strict=True):
            if (merged := support.merge(layer)) is not None:
                check_batch(merged)

    def _request(self, kind: str, model: Any) -> None:
        messages = copy.deepcopy(_MESSAGES) if kind == "chat" else []
        text = "" if kind == "chat" else "Once upon a time"
        request = ClientRequest(SimpleNamespace(request_type=kind, prompt=text, messages=messages))
        headers = Message()
        headers["X-Session-ID"] = "tested"
        body = frozen({"messages": messages, "stream": True})
        self.ask("request_received", request=request, headers=FrozenHeaders(headers), body=body)
        if kind == "chat":
            self.guard("prepare_messages", self._prepare)
        prompt = Prompt(_IDS, [_IDS[:9], _IDS[9:]], ["system", "user"], frozen(messages))
        answer = self.ask("take_request", request=request, prompt=prompt)
        if answer is not None:
            self.guard("take_request", partial(self._serve, answer, model))
        self.ask("early_headers", request=request)
        self.ask("response_headers", request=request)
        calls = frozen(copy.deepcopy(_CALLS))
        self.ask("reply_sent", request=request, content="Far.", reasoning="", tool_calls=calls)
        self.ask("reply_timed", request=request, times_s=(0.5, 0.6))

    def _prepare(self) -> None:
        """Have a chat prepared twice: the same messages must become the same."""
        chats = []
        for _ in range(2):
            messages, tools = copy.deepcopy(_MESSAGES), copy.deepcopy(_TOOLS)
            manager.prepare_messages(messages, tools)
            chats.append((messages, tools))
        is_same = chats[0] == chats[1]
        expect(is_same, "other messages for the same chat", "the same: prompts are reused")

    def _serve(self, answer: Any, model: Any) -> None:
        """Let a `TakenRequest` wait, enter, and save a prompt and its reply."""
        n_waits = 0
        while not answer.advance():
            n_waits += 1
            expect(n_waits < _MOST_WAITS, f"not ready {n_waits} times", "True in the end")
        prepared = answer.enter()
        if prepared is None:
            return
        check_prepared(prepared)
        caches = list(prepared.caches or self._make_caches())
        ids, n_done = [*prepared.prompt.ids, 50, 51], prepared.n_cached
        system = len(prepared.prompt.segments[0])
        ends = ((system, "system"), (len(ids) - 2, PREFILL), (len(ids), "assistant"))
        for end, cache_type in ends:
            if end <= n_done:
                continue
            mx.eval(model(mx.array([ids[n_done:end]]), cache=caches))
            n_done = end
            answer.insert(tuple(ids[:end]), caches, cache_type)


def tiny_provider() -> Any:
    """Return what plugins use of a model provider, with a model of two layers without files."""
    tokenizer = SimpleNamespace(has_chat_template=False, chat_template=None, eos_token_ids={0})
    args = Namespace(model="tiny", chat_template_args={}, plugin=[])
    key = ("tiny", None, None)
    return SimpleNamespace(model=tiny_model(), tokenizer=tokenizer, model_key=key, cli_args=args)
