"""`python -m tools.measures [CHECKOUT]`: measures of the package's simplicity, in any checkout.

Most measures are counted in the source. The last lines come from `python -m tools.trace` in that
checkout, whose server must start.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Set
from importlib import metadata
from pathlib import Path

NAME = "mlx_lm_kvpersist"
LOCKS = ("Lock", "RLock", "Condition", "Semaphore", "Event")
VAGUE = """about asked both each found given held it its kept known made one ones other others part
parts said seen so such taken that them then there these this those told whole""".split()
_DEFINED = re.compile(r"(?:\b(?:def|class) |\bself\.(?=\w+(?:: .*?)? = )|^)(_[a-z]\w*)", re.M)
_NAMED = re.compile(r"[\"'](?:[\w.]+[.:])?(_[a-z]\w*)[\"']|\bmlx_lm\b.* import .*\b(_[a-z]\w*)")
_READ = re.compile(r"\.(_[a-z]\w*)")
Sources = Mapping[str, str]
"""The text of each module by its name, such as `mlx_lm_kvpersist.store.pool`."""


def sources_of(checkout: Path) -> Sources:
    """Return each module's text; the text of an `__init__` has the name of its folder."""
    sources = {}
    for path in sorted((checkout / NAME).rglob("*.py")):
        name = ".".join(path.relative_to(checkout).with_suffix("").parts)
        sources[name.removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return sources


def n_vague_names(source: str) -> int:
    """Count vague names that an assignment, a loop or a parameter binds."""
    nodes = list(ast.walk(ast.parse(source)))
    stored = (node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store))
    names = [getattr(node, "id", "") for node in stored]
    names += [node.arg for node in nodes if isinstance(node, ast.arg)]
    return sum(name in VAGUE for name in names)


def imports_of(module: str, sources: Sources) -> set[str]:
    """Return the package's modules that a module imports, anywhere in its text."""
    is_folder = any(name.startswith(f"{module}.") for name in sources)
    parts, names = module.split("."), set[str]()
    for node in ast.walk(ast.parse(sources[module])):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = parts[: len(parts) + is_folder - node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            members = (f"{base}.{alias.name}" for alias in node.names)
            names.update(member if member in sources else base for member in members)
    return (names & sources.keys()) - {module}


def import_cycles(imports: Mapping[str, Set[str]]) -> set[frozenset[str]]:
    """Return the groups of modules that all import each other, directly or through others."""
    reached = {module: set(names) for module, names in imports.items()}
    for via, beyond in reached.items():
        for names in reached.values():
            if via in names:
                names |= beyond
    groups = ({n for n in names if module in reached[n]} for module, names in reached.items())
    return {frozenset(group) for group in groups if group}


def n_locks(source: str) -> int:
    """Count locks that a module makes, by a call or as a default factory."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    makers = [call.func for call in calls] + [key.value for call in calls for key in call.keywords]
    names = {f"threading.{name}" for name in LOCKS}
    for line in re.findall(r"^from threading import (.*)$", source, re.M):
        names |= set(LOCKS) & set(line.split(", "))
    return sum(ast.unparse(maker) in names for maker in makers)


def private_names(ours: str, theirs: str) -> set[str]:
    """Return mlx-lm's private names that the package uses in imports, strings or attributes."""
    named = {name for pair in _NAMED.findall(ours) for name in pair}
    read = set(_READ.findall(ours)) - set(_DEFINED.findall(ours))
    return set(_DEFINED.findall(theirs)) & (named | read)


def measures(checkout: Path) -> Iterator[str]:
    sources = sources_of(checkout)
    n_lines = sum(text.count("\n") for text in sources.values())
    n_vague = sum(map(n_vague_names, sources.values()))
    imports = {module: imports_of(module, sources) for module in sources}
    cycles = sorted(", ".join(sorted(group)) for group in import_cycles(imports))
    host = metadata.distribution("mlx-lm").locate_file("mlx_lm")
    theirs = "\n".join(path.read_text("utf-8") for path in Path(str(host)).rglob("*.py"))
    private = sorted(private_names("\n".join(sources.values()), theirs))
    yield f"lines of the package: {n_lines:,}"
    yield f"vague names bound per 1,000 lines: {1000 * n_vague / n_lines:.1f}"
    yield f"import cycles: {len(cycles)}" + "".join(f"\n  {cycle}" for cycle in cycles)
    yield f"locks and events: {sum(map(n_locks, sources.values()))}"
    yield f"modules that import ranks: {sum(f'{NAME}.ranks' in each for each in imports.values())}"
    yield f"private names of mlx-lm: {len(private)}\n  {', '.join(private)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).parents[1])
    checkout = parser.parse_args().checkout.resolve()
    print("\n".join(measures(checkout)), flush=True)
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    sys.exit(subprocess.call([sys.executable, "-m", "tools.trace"], cwd=checkout, env=env))


if __name__ == "__main__":
    main()
