"""The server's options, and those that plugins add."""

from __future__ import annotations

import argparse
from types import ModuleType
from typing import Any

from .._startup import stop
from . import manager


class PluginArgumentParser(argparse.ArgumentParser):
    """A parser that takes `--plugin` and the options of the plugins.

    They are added when the command line is parsed, after all stock options: so the help shows
    them last, and a clash with a stock option is the plugin's error and not the server's.
    """

    _plugin_options_added = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if not self._plugin_options_added:
            self._plugin_options_added = True
            # Its value was read before; here it is checked and documented.
            self.add_argument_group("plugins").add_argument(
                "--plugin",
                action="append",
                default=[],
                metavar="NAME",
                help="Load a plugin of the server; can be given more than once. "
                f"Installed: {', '.join(manager.installed_plugins()) or 'none'}",
            )
            try:
                manager.ask("add_options", parser=self)
            except Exception as error:
                stop(error)
        return super().parse_known_args(args, namespace)


class ArgparseView(ModuleType):
    """The argparse module as `mlx_lm.server` sees it: another ArgumentParser, all else the same.

    Replacing the name in the server's module, rather than argparse's own class, leaves every
    other program part alone.
    """

    ArgumentParser = PluginArgumentParser

    def __getattr__(self, name: str) -> Any:
        return getattr(argparse, name)


def plugin_argparse(stock: ModuleType) -> ModuleType:
    """Return what stands in for the server's `argparse`."""
    return ArgparseView(stock.__name__, stock.__doc__)
