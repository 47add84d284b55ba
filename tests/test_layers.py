"""Imports point one way: each part may import only the parts listed for it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.measures import import_cycles, imports_of, sources_of

PACKAGE = Path(__file__).parent.parent / "mlx_lm_kvpersist"

MAY_IMPORT: dict[str, set[str]] = {
    "_startup": {"host", "errors"},
    "__main__": {"cli"},
    "cli": {
        "_startup",
        "api",
        "block",
        "cache",
        "config",
        "apis",
        "errors",
        "host",
        "match",
        "round_trip",
        "store",
        "units",
    },
    "testing": {"errors", "host", "round_trip"},
    "plugins": {"apis", "errors", "host", "testing"},
    "plugin": {
        "ranks",
        "api",
        "block",
        "cache",
        "config",
        "errors",
        "host",
        "match",
        "request",
        "round_trip",
        "store",
        "units",
    },
    "round_trip": {"cache", "errors", "host", "request", "store"},
    "config": {"api", "cache", "errors", "store", "units"},
    "host": {"apis", "errors", "image_ids", "ranks", "units"},
    "api": {"apis", "errors", "units"},
    "request": {
        "ranks",
        "block",
        "cache",
        "apis",
        "errors",
        "host",
        "image_ids",
        "match",
        "store",
        "units",
    },
    "store": {"block", "config", "errors", "match", "units"},
    "cache": {"errors", "units"},
    "match": {"block", "image_ids"},
    "ranks": set(),
    "block": {"image_ids"},
    "image_ids": set(),
    "errors": set(),
    "apis": {"errors"},
    "units": set(),
}
NO_MLX = {
    *("_startup", "apis", "block", "errors", "image_ids", "match", "units"),
}


def parts() -> dict[str, list[Path]]:
    """Return the modules of each part: a folder, or a single module."""
    modules: dict[str, list[Path]] = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if name != "__init__":
            modules.setdefault(name, []).append(path)
    return modules


def imported(path: Path) -> set[str]:
    """Return the absolute names that a module imports."""
    module = ("mlx_lm_kvpersist", *path.relative_to(PACKAGE).with_suffix("").parts)
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module[: -node.level]) if node.level else ""
            base = f"{base}.{node.module}".strip(".") if node.module else base
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def test_every_folder_and_module_is_listed() -> None:
    assert parts().keys() == MAY_IMPORT.keys()


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_each_part_imports_only_allowed_parts(part: str) -> None:
    for path in parts()[part]:
        for name in imported(path):
            if not name.startswith("mlx_lm_kvpersist."):
                continue
            used = name.split(".")[1]
            allowed = {*MAY_IMPORT[part], part, "__version__"}
            assert used in allowed, f"{path.relative_to(PACKAGE)} imports {name}"


@pytest.mark.parametrize("part", sorted(NO_MLX))
def test_parts_listed_without_mlx_do_not_import_it(part: str) -> None:
    for path in parts()[part]:
        bad = {name for name in imported(path) if name.split(".")[0] in ("mlx", "mlx_lm")}
        assert not bad, f"{path.relative_to(PACKAGE)} imports {bad}"


def test_no_process_is_forked() -> None:
    """Metal does not work in a fork."""
    for path in PACKAGE.rglob("*.py"):
        modules = {name.split(".")[0] for name in imported(path)}
        assert not modules & {"multiprocessing", "pty"}, path.relative_to(PACKAGE)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not used & {"fork", "forkpty", "ProcessPoolExecutor"}, path.relative_to(PACKAGE)


def test_no_deadline_uses_the_wall_clock() -> None:
    """The wall clock advances while a Mac sleeps, so a deadline passes before the Mac wakes."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
                added = {ast.unparse(node.left), ast.unparse(node.right)}
                assert "time.time()" not in added, f"{path.relative_to(PACKAGE)}:{node.lineno}"


def test_no_two_classes_share_a_name() -> None:
    paths: dict[str, Path] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                other = paths.setdefault(node.name, path)
                assert other == path, f"{node.name} is in {other} and in {path}"


def test_modules_have_no_import_cycles() -> None:
    sources = sources_of(PACKAGE.parent)
    assert not import_cycles({module: imports_of(module, sources) for module in sources})
