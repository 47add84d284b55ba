"""docs/plugins.md agrees with the code: hooks, names, patches, pairs of versions."""

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


def hook_sources(source: str) -> dict[str, str]:
    """Return the normalised source of each hook, with its decorators and docstring."""
    tree = ast.parse(source)
    definitions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    hooks = (
        node for node in definitions if "hookspec" in "".join(map(ast.unparse, node.decorator_list))
    )
    return {node.name: ast.unparse(node) for node in hooks}


def test_page_has_every_hook_as_in_the_code() -> None:
    in_code = hook_sources(Path(hooks.__file__).read_text(encoding="utf-8"))
    in_page: dict[str, str] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        in_page |= hook_sources(block)
    assert in_page == in_code


def test_page_has_every_patch_as_in_the_code() -> None:
    rows = re.findall(r"^\| (\w+) \| `(mlx[^`]*:[^`]*)` \| (.*) \|$", PAGE, re.MULTILINE)
    assert rows == [(patch.name, patch.target, patch.why) for patch in PATCHES]


def test_page_lists_every_supported_pair_of_versions() -> None:
    """The list has the limits for Linux, and a sentence has the limit for a Mac."""
    shown = versions.text
    assert re.findall(r"^- (mlx-lm .*)$", PAGE, re.MULTILINE) == [
        f"mlx-lm {shown(pair.mlx_lm)} with mlx {shown(pair.oldest_mlx)} to {shown(pair.newest_mlx)}"
        for pair in versions.PAIRS
    ]
    assert f"On a Mac, mlx must be {shown(versions.METAL_FLOOR)} or newer." in PAGE


def examples() -> list[str]:
    """Return the page's blocks of Python except the specifications of hooks."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    return [block for block in blocks if not hook_sources(block)]


def test_page_and_examples_use_the_plugins_module_only() -> None:
    """The page has every public name. All examples, also in files, import only this module."""
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


def test_plugins_module_exports_the_types_of_the_hooks() -> None:
    typed = vars(hooks)
    annotations = "".join(
        str(annotation)
        for name in plugins.HOOKS
        for annotation in inspect.get_annotations(typed[name]).values()
    )
    own = {name for name in re.findall(r"\w+", annotations) if name in typed}
    foreign = {"ArgumentParser", "Any", "Callable", "Mapping", "Message", "Namespace", "Sequence"}
    assert own - foreign and own - foreign <= set(plugins.__all__)


@pytest.mark.parametrize("example", [source for source in examples() if "@hookimpl" in source])
def test_example_plugins_on_the_page_pass_check_plugin(example: str) -> None:
    defined: dict[str, Any] = {}
    exec(example, defined)
    plugin_classes = [
        value
        for value in defined.values()
        if isinstance(value, type) and any(hasattr(member, IMPL) for member in vars(value).values())
    ]
    assert len(plugin_classes) == 1
    plugins.check_plugin(plugin_classes[0]())
