"""A conformance test for plugins of the server: docs/plugins.md shows its use.

Every hook that a plugin implements is called as the server would call it, from the options to the
shutdown, in one thread. Faults are collected by the name of the hook.
"""

from __future__ import annotations

import copy
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from email.message import Message
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from .errors import PluginFault, RequestRefused
from .host import hooks, manager
from .host.hooks import PREFILL, REPLY, ClientRequest, FrozenHeaders, Prompt, expect, frozen
from .host.scheduling.model_provider import PluginCaches
from .round_trip import tiny_model

HOOKS = tuple(name for name, value in vars(hooks).items() if hasattr(value, "mlx_lm.server_spec"))
"""The names of all hooks, in the order in which the server calls them."""

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
_NAME = "tested"


def check_plugin(plugin: Any, options: Sequence[str] = (), provider: Any = None) -> None:
    """Raise PluginFault with all faults that `find_faults` finds."""
    if faults := find_faults(plugin, options, provider):
        raise PluginFault("\n".join(f"{hook}: {fault}" for hook, fault in faults.items()))


def find_faults(plugin: Any, options: Sequence[str] = (), provider: Any = None) -> dict[str, str]:
    """Call every hook of a plugin; return the faults, by the name of the hook.

    options: command line options of the plugin. provider: has `model`, `tokenizer`, `model_key` and
    `cli_args` like mlx-lm's ModelProvider; None: a tiny model without files. Raises
    pluggy.PluginValidationError for a hook, or a hook's argument, that the server does not have.
    """
    plugins = manager.PluginManager()
    plugins.register(plugin, name=_NAME)
    plugins.check_pending()
    faults = _Faults()
    with manager.using(plugins, faults):
        _Tested(faults, provider or tiny_provider()).run(options)
    return faults.found


class _Faults(manager.PluginFailures):
    """Keeps the first fault of each hook, instead of logging it."""

    def __init__(self) -> None:
        super().__init__(manager.logger)
        self.found: dict[str, str] = {}

    def report(self, plugin: str, hook: str, error: Exception) -> None:
        is_answer = isinstance(error, PluginFault)
        fault = str(error) if is_answer else f"failed: {type(error).__name__}: {error}"
        self.found.setdefault(hook, fault)


class _Tested:
    """One plugin, while its hooks are called."""

    def __init__(self, faults: _Faults, provider: Any) -> None:
        self._faults, self._provider = faults, provider
        self._model = provider.model
        self._make_caches: Callable[[], Any] = lambda: make_prompt_cache(self._model)

    def run(self, options: Sequence[str]) -> None:
        parser = ArgumentParser()
        self.ask("add_options", parser=parser)
        args = parser.parse_args(options, copy.copy(self._provider.cli_args))
        self.ask("configure", args=args)
        self.ask("routes")
        self.ask("started", serve=lambda work: None)
        self.ask("wired_limit", provider=self._provider, asked_bytes=1 << 34)
        for _, support in self.ask("model_loaded", provider=self._provider) or ():
            manager.safely(_NAME, "model_loaded", self._compute, support)
        for kind in ("chat", "text"):
            self._request(kind)
        self.ask("idle")
        self.ask("shutdown")

    def ask(self, hook: str, **given: Any) -> Any:
        """Call a hook as the server does; return None after an error."""
        return self._guarded(hook, lambda: manager.ask(hook, **given))

    def _guarded(self, hook: str, act: Callable[[], Any]) -> Any:
        """Return a function's result; record an error that would reach the server's client."""
        try:
            return act()
        except RequestRefused:  # a refusal is not a fault
            return None
        except Exception as error:
            self._faults.report(_NAME, hook, error)
            return None

    def _compute(self, support: Any) -> None:
        """Run two sequences of a model through a `ModelSupport`'s caches, and merge the caches."""
        caches = PluginCaches(self._model, _NAME, support)
        self._make_caches, rows = caches, []
        for ids in (_IDS, _IDS[:7]):
            if (row := caches.make()) is None:
                return
            logits = self._model(mx.array([ids]), cache=list(row))
            is_finite = bool(mx.isfinite(logits).all())
            expect(is_finite, "caches that give NaN or infinity", "finite logits")
            rows.append(row)
        is_new = all(first is not second for first, second in zip(*rows, strict=True))
        expect(is_new, "the caches of another sequence", "new caches")
        if all(hasattr(cache, "merge") for cache in rows[0]):  # otherwise the server makes no batch
            for cache in rows[0]:
                caches.merge(cache)

    def _request(self, kind: str) -> None:
        messages = copy.deepcopy(_MESSAGES) if kind == "chat" else []
        text = "" if kind == "chat" else "Once upon a time"
        request = ClientRequest(SimpleNamespace(request_type=kind, prompt=text, messages=messages))
        headers = Message()
        headers["X-Session-ID"] = "tested"
        body = frozen({"messages": messages, "stream": True})
        self.ask("request_received", request=request, headers=FrozenHeaders(headers), body=body)
        if kind == "chat":
            self._guarded("prepare_messages", self._prepare)
        prompt = Prompt(_IDS, [_IDS[:9], _IDS[9:]], ["system", "user"], frozen(messages))
        self.ask("prompt_rendered", request=request, prompt=prompt)
        if (taken := manager.take_request(request, prompt)) is not None:
            manager.safely(_NAME, "take_request", self._serve, taken)
        self.ask("response_headers", request=request, is_early=True)
        self.ask("response_headers", request=request, is_early=False)
        calls = frozen(copy.deepcopy(_CALLS))
        self.ask("reply_sent", request=request, content="Far.", reasoning="", tool_calls=calls)
        self.ask("reply_timed", request=request, times_s=(0.5, 0.6))

    def _prepare(self) -> None:
        """Let a chat be prepared twice: equal messages must stay equal."""
        chats = []
        for _ in range(2):
            messages, tools = copy.deepcopy(_MESSAGES), copy.deepcopy(_TOOLS)
            manager.prepare_messages(messages, tools)
            chats.append((messages, tools))
        is_same = chats[0] == chats[1]
        expect(is_same, "other messages for the same chat", "the same messages on each turn")

    def _serve(self, taken: manager.Taken) -> None:
        """Let a request wait, enter, and save a prompt and its reply."""
        n_waits = 0
        while not taken.advance():
            n_waits += 1
            expect(n_waits < _MOST_WAITS, f"not ready {n_waits} times", "True in the end")
        if (prompt := taken.enter()) is None:
            return
        caches = list(taken.caches or self._make_caches())
        ids, n_done = [*prompt.ids, 50, 51], taken.n_cached
        ends = ((len(prompt.segments[0]), "system"), (len(ids) - 2, PREFILL), (len(ids), REPLY))
        for end, cache_type in ends:
            if end <= n_done:
                continue
            mx.eval(self._model(mx.array([ids[n_done:end]]), cache=caches))
            n_done = end
            taken.insert(ids[:end], caches, cache_type)


def tiny_provider() -> Any:
    """Return a model provider for plugins; its model has two layers and no files."""
    tokenizer = SimpleNamespace(has_chat_template=False, chat_template=None, eos_token_ids={0})
    args = Namespace(model="tiny", chat_template_args={}, plugin=[])
    key = ("tiny", None, None)
    return SimpleNamespace(model=tiny_model(), tokenizer=tokenizer, model_key=key, cli_args=args)
