"""The package declares what it imports, and imports what it declares."""

from __future__ import annotations

import ast
import re
import sys

from tests.support.host import REPOSITORY

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = REPOSITORY / "mlx_lm_kvpersist"


def imported() -> set[str]:
    """Return the distributions that the package's modules import, by their normalised names."""
    names: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(str(node.module).partition(".")[0])
    third_party = names - sys.stdlib_module_names - {PACKAGE.name, "tomllib"}
    return {name.replace("_", "-") for name in third_party}


def test_declared_and_imported_dependencies_are_the_same() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = project["dependencies"] + extras["encrypt"] + extras["shared"]
    declared = {re.split(r"[ <>=!\[;~]", line)[0] for line in lines} - {project["name"]}
    assert declared == imported()
