"""docs/plugins.md says what the code says: hooks, names, patches, pairs of versions."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvpersist import plugins
from mlx_lm_kvpersist.host import hooks
from mlx_lm_kvpersist.host.patching import versions
from mlx_lm_kvpersist.host.patching.patches import PATCHES
from tests.support.host import REPOSITORY

IMPL = f"{hooks.PROJECT}_impl"
FILES = [file.read_text(encoding="utf-8") for file in (REPOSITORY / "examples").rglob("*.py")]
PAGE = (REPOSITORY / "docs" / "plugins.md").read_text(encoding="utf-8")


def functions(source: str) -> dict[str, str]:
    """Return the hooks in a source, as the parser sees them, with decorators and docstring."""
    tree = ast.parse(source)
    found = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    hooks = (node for node in found if "hookspec" in "".join(map(ast.unparse, node.decorator_list)))
    return {node.name: ast.unparse(node) for node in hooks}


def test_every_hook_stands_there_as_it_is() -> None:
    in_code = functions(Path(hooks.__file__).read_text(encoding="utf-8"))
    in_page: dict[str, str] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        in_page |= functions(block)
    assert in_page == in_code


def test_every_patch_stands_there_as_it_is() -> None:
    rows = re.findall(r"^\| (\w+) \| `(mlx[^`]*:[^`]*)` \| (.*) \|$", PAGE, re.MULTILINE)
    assert rows == [(patch.name, patch.target, patch.why) for patch in PATCHES]


def test_every_pair_stands_there() -> None:
    assert re.findall(r"^- (mlx-lm .*)$", PAGE, re.MULTILINE) == [str(p) for p in versions.PAIRS]


def examples() -> list[str]:
    """Return the page's blocks of Python except the hooks themselves."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    return [block for block in blocks if not functions(block)]


def test_one_module_has_all_that_the_page_shows() -> None:
    """Each of its names is on the page, and each example imports from it alone.

    So do the examples in files.
    """
    for name in plugins.__all__:
        assert re.search(rf"\b{name}\b", PAGE), f"{name} is not on the page"
        assert getattr(plugins, name) is not None
    imported = {
        (node.module, alias.name)
        for example in [*examples(), *FILES]
        for node in ast.walk(ast.parse(example))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("mlx_lm")
        for alias in node.names
    }
    assert imported <= {("mlx_lm_kvpersist.plugins", name) for name in plugins.__all__}
    assert ("mlx_lm_kvpersist.plugins", "hookimpl") in imported
    with pytest.raises(AttributeError):
        plugins.no_such_name  # noqa: B018


def test_the_types_of_the_hooks_are_in_that_module() -> None:
    typed = vars(hooks)
    annotations = "".join(
        str(annotation)
        for name in plugins.HOOKS
        for annotation in inspect.get_annotations(typed[name]).values()
    )
    own = {name for name in re.findall(r"\w+", annotations) if name in typed}
    of_others = {"ArgumentParser", "Any", "Callable", "Mapping", "Message", "Namespace", "Sequence"}
    assert own - of_others and own - of_others <= set(plugins.__all__)


@pytest.mark.parametrize("example", [e for e in examples() if "@hookimpl" in e])
def test_the_plugins_on_the_page_conform(example: str) -> None:
    defined: dict[str, Any] = {}
    exec(example, defined)
    made = [
        value
        for value in defined.values()
        if isinstance(value, type) and any(hasattr(each, IMPL) for each in vars(value).values())
    ]
    assert len(made) == 1
    plugins.check_plugin(made[0]())
