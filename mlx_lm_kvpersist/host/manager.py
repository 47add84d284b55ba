"""The plugin manager: loads plugins by name, calls their hooks, and guards these calls.

The current manager is a global that is read at every call, so that a probe can replace it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import pluggy

from ..errors import ClientGone, ConfigError, Failures, PluginFault, PluginNotFound, RequestRefused
from . import hooks
from .hooks import ClientRequest, Prepared, Prompt, Route, TakenRequest
from .http.request_checks import check_messages

ENTRY_POINT_GROUP = "mlx_lm.server.plugins"

logger = logging.getLogger(__name__)


RAISED: dict[str, type[Exception]] = {
    **dict.fromkeys(("add_options", "configure", "routes", "started"), Exception),
    **dict.fromkeys(("model_loaded", "prepare_messages"), Exception),
    "request_received": RequestRefused,
}
"""The errors that reach the caller, by hook. All other errors are logged."""
NAMED = ("model_loaded", "take_request")
"""Hooks whose answers are paired with the plugin's name, for later calls of the plugin."""


class PluginManager(pluggy.PluginManager):
    """Calls the hooks of the server. A plugin's failure is logged; see `RAISED`."""

    def __init__(self) -> None:
        super().__init__(hooks.PROJECT)
        self.add_hookspecs(hooks)

    def register(self, plugin: Any, name: str | None = None) -> str | None:
        registered = super().register(plugin, name)
        for caller in self.get_hookcallers(plugin) or ():
            for implementation in caller.get_hookimpls():
                if implementation.plugin is plugin:
                    call = partial(_answer, str(registered), caller.name, implementation.function)
                    implementation.function = call  # type: ignore[misc]
        return registered


def _answer(plugin: str, hook: str, function: Callable[..., Any], *args: Any) -> Any:
    check, raised = partial(hooks.check_answer, hook), RAISED.get(hook, ())
    answer = safely(plugin, hook, function, *args, check=check, raised=raised)
    return (plugin, answer) if hook in NAMED and answer is not None else answer


def load_plugins(names: Sequence[str]) -> PluginManager:
    """Return a manager with the named plugins, each from an entry point of the same name.

    Raises PluginNotFound, or PluginFault for an unknown hook or an unknown argument of a hook.
    """
    manager = PluginManager()
    name = ""
    try:
        # pluggy first asks the plugin that was registered last.
        for name in reversed(names):
            plugin = find_entry_point(name).load()
            manager.register(plugin() if isinstance(plugin, type) else plugin, name=name)
        # A misspelt hook would otherwise never be called, and nobody would know.
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginFault(
            f"the plugin {manager.get_name(error.plugin) or name}: {error}"
        ) from error
    return manager


def find_entry_point(name: str) -> metadata.EntryPoint:
    """Return the entry point of a plugin; raises PluginNotFound with the installed names.

    This package is searched first: searching all installed packages takes longer.
    """
    try:
        candidates = metadata.distribution("mlx-lm-kvpersist").entry_points
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        candidates = metadata.EntryPoints()
    candidates = candidates.select(group=ENTRY_POINT_GROUP, name=name)
    for entry_point in candidates or metadata.entry_points(group=ENTRY_POINT_GROUP, name=name):
        return entry_point
    raise PluginNotFound(
        f"no plugin named {name!r} is installed in this environment; "
        f"installed: {', '.join(installed_plugins()) or 'none'}"
    )


def installed_plugins() -> list[str]:
    """Return the names that `--plugin` accepts."""
    entry_points = metadata.entry_points(group=ENTRY_POINT_GROUP)
    return sorted({entry_point.name for entry_point in entry_points})


class PluginFailures(Failures):
    """Failures of plugins, which do not stop the server."""

    def report(self, plugin: str, hook: str, error: Exception) -> None:
        """Log a failure, with a traceback unless it is a PluginFault."""
        kind = f"plugin {plugin} in {hook}: {type(error).__name__}"
        log = partial(self.add, kind=kind, level=logging.ERROR)
        if isinstance(error, PluginFault):
            log("plugin %s in hook %s %s; ignored", plugin, hook, error)
        else:
            log("plugin %s failed in hook %s; ignored", plugin, hook, exc_info=error)


_current: pluggy.PluginManager = PluginManager()
failures = PluginFailures(logger)


def set_current(manager: pluggy.PluginManager, failed: PluginFailures | None = None) -> None:
    """Make the server ask the plugins of `manager`; `failed` records their failures."""
    global _current, failures
    _current, failures = manager, failed or PluginFailures(logger)


@contextmanager
def using(manager: pluggy.PluginManager, failed: PluginFailures | None = None) -> Iterator[None]:
    """Ask the plugins of `manager` inside the block. Not for a running server."""
    previous = _current
    set_current(manager, failed)
    try:
        yield
    finally:
        set_current(previous)


def ask(hook: str, **arguments: Any) -> Any:
    """Return the answers to a hook, except None; for a `firstresult` hook, the first answer."""
    return getattr(_current.hook, hook)(**arguments)


def safely(
    plugin: str,
    hook: str,
    function: Callable[..., Any],
    *args: Any,
    check: Callable[[Any], None] | None = None,
    raised: type[Exception] | tuple[()] = (),
) -> Any:
    """Return the result of a plugin's function; if that fails, log the error and return None.

    check: raises PluginFault for an unusable answer. raised: the errors that reach the caller.
    """
    try:
        answer = function(*args)
        if check is not None and answer is not None:
            check(answer)
        return answer
    except raised as error:
        if isinstance(error, PluginFault):
            raise PluginFault(f"plugin {plugin} in hook {hook} {error}") from error
        raise
    except Exception as error:
        failures.report(plugin, hook, error)
        return None


def prepare_messages(messages: list[Any], tools: Any) -> None:
    """Let plugins change messages and tools in place. The result is checked.

    Raises RequestRefused if a plugin refuses the request, or if `messages` is not a list of
    messages. Raises PluginFault if a plugin fails, or makes `messages` invalid.
    """
    check_messages(messages)
    names = " or ".join(each.plugin_name for each in _current.hook.prepare_messages.get_hookimpls())
    culprit = f"plugin {names} in hook prepare_messages"
    try:
        ask("prepare_messages", messages=messages, tools=tools)
    except RequestRefused:
        raise
    except Exception as error:
        raise PluginFault(f"{culprit} failed: {type(error).__name__}: {error}") from error
    try:
        check_messages(messages)
    except RequestRefused as error:
        raise PluginFault(f"{culprit} broke the request: {error}") from error


def plugin_routes() -> dict[tuple[str, str], Route]:
    """Return the plugins' routes by (method, path); raises ConfigError if two have the same key."""
    routes: dict[tuple[str, str], Route] = {}
    for answer in ask("routes"):
        for route in answer:
            key = route.method, route.path
            if key in routes:
                raise ConfigError(f"two plugins answer {' '.join(key)}; leave one of them out")
            routes[key] = route
    return routes


def is_implemented(hook: str) -> bool:
    return bool(getattr(_current.hook, hook).get_hookimpls())


@dataclass(eq=False)
class Taken:
    """A request that a plugin has taken. Most errors of the plugin are logged and not raised."""

    plugin: str
    request: TakenRequest
    caches: Sequence[Any] | None = None
    n_cached: int = 0
    prompt: Prompt | None = None
    """The prompt that the model reads; None until the request has entered."""
    draft: Prepared | None = None
    """The same prompt for the draft model, with the draft model's caches."""
    images: Sequence[int] | None = None
    """The ids that the model reads for a prompt with images."""
    reply: Any = None
    """The queue of the reply's tokens (`waiting.ReplyQueue`)."""

    def advance(self) -> bool:
        """Tell whether the request can enter; True if the plugin fails. Raises RequestRefused."""
        ready = self._safely(self.request.advance, raised=RequestRefused)
        return ready is None or bool(ready)

    def resume(self, prompt: Prompt) -> None:
        self._safely(self.request.resume, prompt)

    def enter(self) -> Prompt | None:
        """Return the prompt to compute; None if mlx-lm serves the request. Raises ClientGone."""
        prepared: Prepared | None = self._safely(
            self.request.enter, check=hooks.check_prepared, raised=ClientGone
        )
        if prepared is None:
            return None
        self.caches, self.n_cached = prepared.caches, prepared.n_cached
        self.prompt, self.draft = prepared.prompt, prepared.draft
        return prepared.prompt

    def draft_ids(self, run: Sequence[int], n: int) -> Sequence[int]:
        drafts = self._safely(self.request.draft_ids, run, n, check=hooks.check_draft_ids)
        return drafts[:n] if drafts else ()

    def insert(self, tokens: Iterable[int], caches: Iterable[Any], cache_type: str) -> None:
        self._safely(self.request.insert, tuple(tokens), list(caches), cache_type)

    def _safely(self, function: Callable[..., Any], *args: Any, **how: Any) -> Any:
        return safely(self.plugin, "take_request", function, *args, **how)


def take_request(request: ClientRequest, prompt: Prompt) -> Taken | None:
    """Return the `Taken` of the first plugin that takes a request; None if mlx-lm serves it."""
    answer = ask("take_request", request=request, prompt=prompt)
    return None if answer is None else Taken(*answer)


class TakenTokens(list[int]):
    """Token ids of a request that a plugin took. Slices and in-place appends keep `taken`.

    They carry `taken` because mlx-lm passes only ids through its generator and prompt cache.
    """

    def __init__(self, ids: Iterable[int], taken: Taken) -> None:
        super().__init__(ids)
        self.taken = taken

    def __getitem__(self, index: Any) -> Any:
        ids = super().__getitem__(index)
        return TakenTokens(ids, self.taken) if isinstance(index, slice) else ids
