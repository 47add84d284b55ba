"""The measures of simplicity in tools/measures.py count the right names, cycles and locks."""

from __future__ import annotations

from pathlib import Path

from tools.measures import (
    NAME,
    import_cycles,
    imports_of,
    n_locks,
    n_vague_names,
    private_names,
    sources_of,
)

SOURCES = {
    f"{NAME}": "",
    f"{NAME}.ranks": "import os",
    f"{NAME}.store": "from .pool import Pool",
    f"{NAME}.store.pool": "from ..ranks import ranks\nfrom . import disk",
    f"{NAME}.store.disk": f"def late():\n    import {NAME}.store.pool",
}
LOCKS = """
import threading
from threading import Lock, Thread
from .translation import Event

a, b = threading.RLock(), Lock()
c: Lock = field(default_factory=Lock)
d, e = Event(), Thread()
"""
HOST = (
    "class BatchGenerator:\n    def _next(self): ...\n    def _idle(self):\n        self._rows = 1"
)


def test_vague_names_are_counted_once_per_binding() -> None:
    assert n_vague_names("def f(one, rows):\n    for part in one:\n        rows.found = part") == 2


def test_import_cycles_include_imports_within_functions(tmp_path: Path) -> None:
    for name, text in SOURCES.items():
        path = tmp_path.joinpath(*name.split("."))
        is_folder = name in (NAME, f"{NAME}.store")
        path = path / "__init__.py" if is_folder else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    sources = sources_of(tmp_path)
    assert sources == SOURCES
    imports = {module: imports_of(module, sources) for module in sources}
    pool, disk = f"{NAME}.store.pool", f"{NAME}.store.disk"
    assert imports[pool] == {f"{NAME}.ranks", disk}
    assert import_cycles(imports) == {frozenset((pool, disk))}


def test_only_created_threading_locks_are_counted() -> None:
    assert n_locks(LOCKS) == 3


def test_private_names_are_mlx_lm_names_that_code_uses() -> None:
    table = 'Uses("BatchGenerator._next", "x")\nself._rows = 2\nprint(self._rows, self._own)'
    assert private_names(table, HOST) == {"_next"}
    assert private_names("batch._rows.size", HOST) == {"_rows"}
