"""The patches and hooks of `mlx_lm.server`. This package knows nothing about KV.

Importing the package is cheap and changes nothing; `install` does the work.
"""

from __future__ import annotations

from collections.abc import Sequence


def install(names: Sequence[str]) -> None:
    """Load the named plugins, and apply all patches of `mlx_lm.server` or none.

    Raises UnsupportedVersion, PluginNotFound, PluginFault, a PatchError, or the error of a plugin
    that cannot be loaded; the server is then unchanged.
    """
    from .patching import versions

    versions.check()  # first: with another version the next imports may fail
    from . import manager
    from .patching.patches import PATCH_SET, needed
    from .run import PatchChecks

    if PATCH_SET.is_applied:
        return
    plugins = manager.load_plugins(names)
    patches = needed()
    plugins.register(PatchChecks([patch.check for patch in patches]), name="patches")
    PATCH_SET.apply(patches)
    manager.set_current(plugins)


def uninstall() -> None:
    """Restore the functions and classes of `mlx_lm.server`, and forget the plugins."""
    from . import manager
    from .patching.patches import PATCH_SET

    PATCH_SET.undo()
    manager.set_current(manager.PluginManager())
