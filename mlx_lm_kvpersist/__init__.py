"""Persistent memory for `mlx_lm.server`."""

__version__ = "0.1.0"


def install(*plugins: str) -> None:
    """Load plugins into `mlx_lm.server` in this process, for launchers that call `server.main`.

    plugins: names of plugins; by default the names given by `--plugin` on the command line,
    otherwise kvpersist. Options are read from `sys.argv`. If the server cannot be patched, the
    process ends with one line.
    """
    import sys

    from ._startup import prepare
    from .host.stopping import requested_plugins

    prepare(plugins or requested_plugins(sys.argv[1:]) or ["kvpersist"])
