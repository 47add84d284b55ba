"""The plugin manager: loads plugins by name and asks their hooks.

The current manager is the package's one global. It is looked up at every call, so that a probe can
put a manager of its own in its place. Plugins are asked in the order of the command line.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from ..errors import ClientGone, PluginNotFound
from . import hookspecs
from .prompt import Prepared, Prompt

ENTRY_POINT_GROUP = "mlx_lm.server.plugins"

logger = logging.getLogger(__name__)


def make_manager() -> pluggy.PluginManager:
    """Return a manager that knows the hooks of the server and has no plugins."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def load_plugins(names: Sequence[str]) -> pluggy.PluginManager:
    """Return a manager with the named plugins, each from an entry point of the same name.

    Raises PluginNotFound for a name that is not installed, and pluggy's PluginValidationError
    for a hook that the server does not have or that takes other arguments.
    """
    manager = make_manager()
    # pluggy asks the plugin first that was registered last.
    for name in reversed(names):
        plugin = find_entry_point(name).load()
        manager.register(plugin() if isinstance(plugin, type) else plugin, name=name)
    # A misspelt hook would otherwise never be called, and nobody would know.
    manager.check_pending()
    return manager


def find_entry_point(name: str) -> EntryPoint:
    """Return the entry point of a plugin; raises PluginNotFound with the names there are."""
    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return entry_point
    raise PluginNotFound(
        f"no plugin named {name!r} is installed in this environment; "
        f"installed: {', '.join(installed_plugins()) or 'none'}"
    )


def installed_plugins() -> list[str]:
    """Return the names that `--plugin` takes."""
    return sorted({entry_point.name for entry_point in entry_points(group=ENTRY_POINT_GROUP)})


_current = make_manager()
"""The manager whose plugins the server asks."""
_logged: set[tuple[str, str, type[Exception]]] = set()


def set_current(manager: pluggy.PluginManager) -> None:
    """Make the server ask the plugins of `manager`."""
    global _current
    _current = manager
    _logged.clear()


@contextmanager
def using(manager: pluggy.PluginManager) -> Iterator[None]:
    """Ask the plugins of `manager` inside the block. Not for a server that serves."""
    previous = _current
    set_current(manager)
    try:
        yield
    finally:
        set_current(previous)


def ask(hook: str, **arguments: Any) -> Any:
    """Call a hook as pluggy does; what a plugin raises reaches the caller."""
    return getattr(_current.hook, hook)(**arguments)


def ask_each(
    hook: str, only: Any = None, *, passed_on: tuple[type[Exception], ...] = (), **arguments: Any
) -> Iterator[tuple[Any, Any]]:
    """Yield each plugin that answers a hook, with its answer; None is no answer.

    For places where nothing would catch an exception. A plugin that raises is logged and passed
    over: the first failure of a kind with its traceback, the same kind again at DEBUG only.
    only: the one plugin to ask. passed_on: exceptions that reach the caller.
    """
    # pluggy calls the last implementation first.
    for implementation in reversed(getattr(_current.hook, hook).get_hookimpls()):
        if only is not None and implementation.plugin is not only:
            continue
        taken = {name: arguments[name] for name in implementation.argnames}
        try:
            answer = implementation.function(**taken)
        except passed_on:
            raise
        except Exception as error:
            kind = (implementation.plugin_name, hook, type(error))
            log = logger.debug if kind in _logged else logger.error
            _logged.add(kind)
            log(
                "plugin %s failed in hook %s; the server goes on without its answer",
                implementation.plugin_name,
                hook,
                exc_info=True,
            )
            continue
        if answer is not None:
            yield implementation.plugin, answer


def ask_first(hook: str, only: Any = None, **arguments: Any) -> Any:
    """Return the first answer to a hook, or that of the plugin `only`; None without one.

    Plugins that raise are logged.
    """
    return next((answer for _, answer in ask_each(hook, only, **arguments)), None)


def ask_all(hook: str, **arguments: Any) -> list[Any]:
    """Return every answer to a hook; plugins that raise are logged."""
    return [answer for _, answer in ask_each(hook, **arguments)]


def take_request(request: Any, args: Any, tokenizer: Any, prompt: Prompt) -> Prepared | None:
    """Return the first plugin's answer that can be served; None when no plugin takes the request.

    An answer that cannot be served is logged, and the next plugin is asked.
    """
    given = {"request": request, "args": args, "tokenizer": tokenizer, "prompt": prompt}
    for plugin, prepared in ask_each("take_request", passed_on=(ClientGone,), **given):
        if not isinstance(prepared, Prepared):
            wrong = f"a {type(prepared).__name__}, expected a Prepared"
        else:
            fed, n_cached = prepared.prompt, prepared.n_cached
            joined = [token for segment in fed.segments for token in segment]
            if len(fed.segments) != len(fed.segment_types) or not all(fed.segments):
                wrong = "segments without a type or without ids"
            elif joined != fed.ids:
                wrong = "segments that are not its ids cut up"
            elif not 0 <= n_cached < len(fed.ids) or (n_cached > 0) != bool(prepared.caches):
                wrong = f"{n_cached} cached of {len(fed.ids)} tokens, or caches for none"
            else:
                prepared.plugin = plugin
                return prepared
        logger.error("hook take_request of %s answered %s; ignored", type(plugin).__name__, wrong)
    return None


def is_implemented(hook: str) -> bool:
    """Tell whether any plugin implements a hook."""
    return bool(getattr(_current.hook, hook).get_hookimpls())
