"""docs/plugins.md says what the code says: every hook, every patch, every pair of versions."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from mlx_lm_kvpersist.host import hookspecs
from mlx_lm_kvpersist.host.patching import versions
from mlx_lm_kvpersist.host.patching.patches import PATCHES
from tests.support.host import REPOSITORY

PAGE = (REPOSITORY / "docs" / "plugins.md").read_text(encoding="utf-8")


def functions(source: str) -> dict[str, str]:
    """Return the hooks in a source, as the parser sees them, with decorators and docstring."""
    tree = ast.parse(source)
    found = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    hooks = (node for node in found if "hookspec" in "".join(map(ast.unparse, node.decorator_list)))
    return {node.name: ast.unparse(node) for node in hooks}


def test_every_hook_stands_there_as_it_is() -> None:
    in_code = functions(Path(hookspecs.__file__).read_text(encoding="utf-8"))
    in_page: dict[str, str] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        in_page |= functions(block)
    assert in_page == in_code


def test_every_patch_stands_there_as_it_is() -> None:
    rows = re.findall(r"^\| (\w+) \| `(mlx[^`]*:[^`]*)` \| (.*) \|$", PAGE, re.MULTILINE)
    assert rows == [(patch.name, patch.target, patch.why) for patch in PATCHES]


def test_every_pair_stands_there() -> None:
    assert re.findall(r"^- (mlx-lm .*)$", PAGE, re.MULTILINE) == [str(p) for p in versions.PAIRS]
