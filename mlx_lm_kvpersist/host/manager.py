"""The plugin manager: loads plugins by name and asks their hooks.

The current manager is the package's one global. Patches ask it at call time, so that a probe
can put a manager of its own in its place.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from ..errors import PluginNotFound
from . import hookspecs

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
    for name in names:
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
_logged: set[tuple[str, type[Exception]]] = set()


def current() -> pluggy.PluginManager:
    """Return the manager whose plugins the server asks."""
    return _current


def set_current(manager: pluggy.PluginManager) -> None:
    """Make the server ask the plugins of `manager`."""
    global _current
    _current = manager
    _logged.clear()


@contextmanager
def using(manager: pluggy.PluginManager) -> Iterator[None]:
    """Ask the plugins of `manager` inside the block. Not for a server that serves."""
    previous = current()
    set_current(manager)
    try:
        yield
    finally:
        set_current(previous)


def ask(hook: str, **arguments: Any) -> Any:
    """Call a hook; what it raises reaches the caller."""
    return getattr(current().hook, hook)(**arguments)


def ask_safely(hook: str, **arguments: Any) -> Any:
    """Call a hook where nobody would catch what it raises: a failure is logged and is None.

    The first failure of a kind is logged with its traceback, the same kind again only at DEBUG.
    """
    try:
        return ask(hook, **arguments)
    except Exception as error:
        kind = (hook, type(error))
        if kind in _logged:
            logger.debug("hook %s failed again", hook, exc_info=True)
        else:
            _logged.add(kind)
            logger.exception("hook %s failed, the stock server's way is used", hook)
        return None


def is_implemented(hook: str) -> bool:
    """Tell whether any plugin answers a hook."""
    return bool(getattr(current().hook, hook).get_hookimpls())
