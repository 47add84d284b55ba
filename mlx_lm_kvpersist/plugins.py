"""The interface for plugins of the server: import all names from here. docs/plugins.md shows them.

The names are stable: only a new major or minor version may remove a name or change a hook's
arguments, and CHANGELOG.md says so. Every release may add hooks, and fields with a default. Other
modules of the package can change in every release.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .apis import API, Event, ReplyFormat, Request, Usage
from .errors import ConfigError, KVPersistError, PluginFault, RequestRefused
from .host.hooks import (
    ClientRequest,
    ModelSupport,
    PrefillLimits,
    Prepared,
    Prompt,
    Route,
    TakenRequest,
    hookimpl,
)

if TYPE_CHECKING:
    from .testing import HOOKS, check_plugin, find_faults

__all__ = [
    "API",
    "HOOKS",
    "ClientRequest",
    "ConfigError",
    "Event",
    "KVPersistError",
    "ModelSupport",
    "PluginFault",
    "PrefillLimits",
    "Prepared",
    "Prompt",
    "ReplyFormat",
    "Request",
    "RequestRefused",
    "Route",
    "TakenRequest",
    "Usage",
    "check_plugin",
    "find_faults",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    """Return a name of the conformance test, which a server does not import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import testing

    return getattr(testing, name)
