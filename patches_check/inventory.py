"""The installed mlx-lm: its cache classes, and the modules that import patched names.

The source of mlx-lm is read, not imported: importing 120 model modules takes half a minute.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mlx_lm_kvpersist.cache.geometry.kinds import KINDS, REFUSED
from mlx_lm_kvpersist.host.patching.patches import Patch

SERVER = "mlx_lm.server"
BATCHES = {"BatchKVCache": "KVCache", "BatchRotatingKVCache": "RotatingKVCache"}
"""Each class of a batch, and the class that it is merged from and extracted to."""
OWN_CACHES = {"deepseek_v41": "has no batch class; the model is served as stock serves it"}
"""Modules of models that define a cache class of their own."""
NO_LAYERS = {
    "_BaseCache": "base class",
    "LRUPromptCache": "stock's store of prompts, replaced by the patch prompt_cache",
}


@dataclass(frozen=True)
class Found:
    """A name of mlx-lm, its module, and how the plugin treats it."""

    name: str
    where: str
    said: str
    is_known: bool = True


def cache_classes() -> list[Found]:
    found = []
    for module, tree in _modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and _is_cache(node):
                said = _kept(node.name, module)
                found.append(
                    Found(node.name, module, said or "unknown: decide how it is stored", bool(said))
                )
    return found


def _is_cache(node: ast.ClassDef) -> bool:
    bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    return any(name.endswith("Cache") or name == "CacheList" for name in (node.name, *bases))


def _kept(name: str, module: str) -> str:
    kinds = {cls.__name__: kind.group.value for cls, kind in KINDS.items()}
    if module != "mlx_lm.models.cache":
        return OWN_CACHES.get(module.rpartition(".")[2], "")
    if name in kinds:
        return f"stored: {kinds[name]}"
    if name == "CacheList":
        return "taken apart"
    if name in REFUSED:
        return f"refused: {REFUSED[name]}"
    if name in BATCHES:
        return f"a batch of {BATCHES[name]}"
    return NO_LAYERS.get(name, "")


def bindings(patches: Iterable[Patch]) -> list[Found]:
    """Return, for every patched name, the modules of mlx-lm that import it.

    The server's globals are replaced for the server alone, so other modules keep stock's objects.
    Any other patch must reach every module that uses the name.
    """
    found = []
    for patch in patches:
        module = patch.target.partition(":")[0]
        others = [one for one, name in _imports() if name == patch.attribute and one != module]
        where = ", ".join([module, *others])
        if module == SERVER:
            said = "replaced for the server alone" + ("; other modules keep stock's" * bool(others))
            found.append(Found(patch.attribute, where, said))
        elif others:
            said = f"{', '.join(others)} would still use stock's; patch these modules, too"
            found.append(Found(patch.attribute, where, said, is_known=False))
        else:
            found.append(Found(patch.attribute, where, "replaced in every module"))
    return found


@lru_cache(maxsize=1)
def _modules() -> dict[str, ast.Module]:
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    return {
        ".".join(("mlx_lm", *path.relative_to(folder).with_suffix("").parts)): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for path in sorted(folder.rglob("*.py"))
    }


def _imports() -> Iterator[tuple[str, str]]:
    for module, tree in _modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                yield from ((module, alias.name) for alias in node.names)
