"""Makes `--plugin` work in `mlx_lm.server`.

A .pth file imports this module, so it needs only the standard library.

`install` puts a finder in front of `sys.meta_path`. The real finders and loader still import
`mlx_lm.server`; then its `main` is wrapped, to load the plugins first. Garbage collection is off
while mlx_lm is imported: imports leave no garbage, and the search for garbage would take a tenth of
the import's time. Every error ends the process with a line on stderr.
"""

from __future__ import annotations

import functools
import gc
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from .host.stopping import requested_plugins, stop

PACKAGE = "mlx_lm"
TARGET = "mlx_lm.server"


def install() -> None:
    """Put the finder in place, once: in a virtual environment, two .pth files may call this."""
    if not any(isinstance(finder, ServerFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, ServerFinder())


def wrap_main(module: ModuleType) -> None:
    stock = module.main

    @functools.wraps(stock)
    def main() -> Any:
        if any(arg.partition("=")[0] == "--plugin" for arg in sys.argv[1:]):
            prepare(requested_plugins(sys.argv[1:]))
        return stock()

    module.main = main  # type: ignore[attr-defined]


def prepare(names: Sequence[str]) -> None:
    """Load these plugins and patch the server, or end the process."""
    try:
        from .host import install as install_host

        with without_garbage():
            install_host(names)
    except Exception as error:
        stop(error)


@contextmanager
def without_garbage() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()  # otherwise the first search would look at all imported objects
            gc.enable()


class ServerFinder(MetaPathFinder):
    """Finds `mlx_lm` and `mlx_lm.server` with the other finders, and wraps the modules' loaders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in (PACKAGE, TARGET):
            return None
        for finder in sys.meta_path:
            if isinstance(finder, ServerFinder) or not hasattr(finder, "find_spec"):
                continue
            if (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = ServerLoader(spec.loader)
                return spec
        return None


class ServerLoader(Loader):
    """Executes a module with its real loader; then wraps `main` of the server."""

    def __init__(self, real: Loader) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def exec_module(self, module: ModuleType) -> None:
        # From now on the module looks as if its real loader had loaded it.
        module.__loader__ = self.real
        if module.__spec__ is not None:
            module.__spec__.loader = self.real
        with without_garbage():
            self.real.exec_module(module)
        if module.__name__ == TARGET:
            wrap_main(module)

    def get_code(self, fullname: str) -> CodeType:
        """Return the code that `python -m mlx_lm.server` runs.

        runpy asks the loader for code and executes it as `__main__`, a second copy of the module
        that no import hook sees. So this code only runs `main` of the wrapped module.
        """
        return compile(f"import {fullname}\n{fullname}.main()\n", fullname, "exec")


def serve(argv: Sequence[str]) -> None:
    """Run `mlx_lm.server` with plugins in this process; needs no .pth file."""
    sys.argv = [TARGET, *argv]
    prepare(requested_plugins(argv))
    importlib.import_module(TARGET).main()
