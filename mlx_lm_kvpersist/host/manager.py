"""The plugin manager: loads plugins by name and asks their hooks.

The current manager is the package's one global. It is looked up at every call, so that a probe can
put a manager of its own in its place. Plugins are asked in the order of the command line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from ..errors import PluginFault, PluginNotFound, RequestRefused
from . import hookspecs
from .answers import CHECKS
from .http.request_checks import check_messages

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


def ask(hook: str, **arguments: Any) -> list[tuple[str, Any]]:
    """Return each plugin that answers a hook, with its answer. Raises what a plugin raises.

    Raises:
        PluginFault: an answer cannot be used.
    """
    return list(ask_each(hook, passed_on=(Exception,), **arguments))


def ask_each(
    hook: str, *, passed_on: tuple[type[Exception], ...] = (), **arguments: Any
) -> Iterator[tuple[str, Any]]:
    """Yield the name of each plugin that answers a hook, with its answer; None is no answer.

    For places where nothing would catch an exception. A plugin that raises, or whose answer cannot
    be used, is logged and passed over. passed_on: exceptions that reach the caller.
    """
    # pluggy calls the last implementation first.
    for one in reversed(getattr(_current.hook, hook).get_hookimpls()):
        taken = {name: arguments[name] for name in one.argnames}
        check, name = CHECKS.get(hook), one.plugin_name
        answer = safely(name, hook, one.function, check=check, passed_on=passed_on, **taken)
        if answer is not None:
            yield name, answer


def safely(
    plugin: str,
    hook: str,
    function: Callable[..., Any],
    *args: Any,
    check: Callable[[Any], None] | None = None,
    passed_on: tuple[type[Exception], ...] = (),
    **kwargs: Any,
) -> Any:
    """Return what a plugin's function returns; None, and a line in the log, if it fails.

    The first failure of a kind is logged with its traceback, the same kind again at DEBUG only.
    check: raises PluginFault for an answer that cannot be used. passed_on: see `ask_each`.
    """
    try:
        answer = function(*args, **kwargs)
        if check is not None and answer is not None:
            check(answer)
        return answer
    except passed_on as error:
        if isinstance(error, PluginFault):
            raise PluginFault(f"plugin {plugin} in hook {hook} {error}") from error
        raise
    except Exception as error:
        kind = (plugin, hook, type(error))
        if kind in _logged:
            logger.debug("plugin %s failed in hook %s", plugin, hook, exc_info=True)
        elif isinstance(error, PluginFault):
            logger.error("plugin %s in hook %s %s; ignored", plugin, hook, error)
        else:
            logger.exception("plugin %s failed in hook %s; ignored", plugin, hook)
        _logged.add(kind)
        return None


def ask_all(
    hook: str, *, passed_on: tuple[type[Exception], ...] = (), **arguments: Any
) -> list[Any]:
    """Return every answer to a hook; see `ask_each`."""
    return [answer for _, answer in ask_each(hook, passed_on=passed_on, **arguments)]


def prepare_messages(messages: list[Any], tools: Any) -> None:
    """Let plugins change messages and tools in place. What they leave is checked.

    Raises:
        RequestRefused: a plugin refuses the request, or there is no list of messages.
        PluginFault: a plugin failed, or left what is no list of messages.
    """
    check_messages(messages)
    for one in reversed(_current.hook.prepare_messages.get_hookimpls()):
        given = {"messages": messages, "tools": tools}
        culprit = f"plugin {one.plugin_name} in hook prepare_messages"
        try:
            one.function(**{argument: given[argument] for argument in one.argnames})
        except RequestRefused:
            raise
        except Exception as error:
            raise PluginFault(f"{culprit} failed: {type(error).__name__}: {error}") from error
        try:
            check_messages(messages)
        except RequestRefused as error:
            raise PluginFault(f"{culprit} broke the request: {error}") from error


def is_implemented(hook: str) -> bool:
    """Tell whether any plugin implements a hook."""
    return bool(getattr(_current.hook, hook).get_hookimpls())
