"""Change the source in small ways, run the tests, and list the changes that no test noticed.

`make mutate` changes the modules that determine a reply: api, cache, host, match, request and
store. Each change (a mutant) is made in a copy of the tree. An interrupted run can continue from
`.mutants/results.json`. `mutants.toml` lists the mutants that may survive, each with the reason.

mutmut and cosmic-ray are not suitable. mutmut forks processes that have loaded MLX, whose threads
do not survive a fork. cosmic-ray changes the tree in which it runs, restarts Python for each
mutant, and does not remove statements. On a platform without `fork` this script does not run.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import hashlib
import importlib
import json
import math
import os
import py_compile
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "mlx_lm_kvpersist"
FOLDERS = ("api", "cache", "host", "request", "store")
RESULTS = ROOT / ".mutants" / "results.json"
ACCEPTED = Path(__file__).with_name("mutants.toml")
MIN_TIMEOUT_S = 30.0
TIMES_BASELINE = 5.0

# One kind of tokenizer: with all four kinds the tests of matching take a minute.
_MATCHING = ["tests/match", "-k", "byte-level-bos or not byte-level and not sentencepiece"]
_ONE_KIND = ["-k", "not sentencepiece and not bos"]
_LOOKUP = ["tests/request/test_costs.py", "tests/request/test_lookup.py"]
_FOLDER = ["tests/store/test_store.py", "tests/store/test_recovery.py"]
TESTS = {
    "api/session_keys": ["tests/api/test_session_keys.py"],
    "cache/blocks": ["tests/cache/blocks"],
    "cache/live/attention": ["tests/cache/live/test_attention.py", "-k", "not long"],
    "cache/live/caches": [
        *("tests/cache/live/test_batch.py", "tests/cache/live/test_full_precision_batch.py"),
        *("tests/cache/live/test_newest.py", "tests/cache/live/test_quantized.py"),
        *("-k", "not give_what and not fault and not tiles and not heads"),
    ],
    "cache/measuring/attention_check": [
        "tests/cache/measuring/test_attention_check.py",
        "tests/cache/measuring/test_observe.py",
    ],
    "cache/measuring/divergence": [
        "tests/cache/measuring/test_divergence.py",
        "tests/cache/measuring/test_texts.py",
    ],
    "cache/live/packed": [
        *("tests/cache/live/test_quantized.py", "tests/cache/live/test_batch.py"),
        "tests/cache/geometry/test_precision.py",
    ],
    "cache/geometry/kinds": [
        *("tests/cache/geometry/test_kinds.py", "tests/cache/geometry/test_spec.py"),
        "tests/cache/blocks/test_cut_join.py",
    ],
    "cache/geometry/spec": [
        "tests/cache/geometry/test_spec.py",
        "tests/cache/geometry/test_probe.py",
    ],
    "host/scheduling/batch_generator": [
        "tests/host/scheduling/test_batch_generator.py",
        "tests/host/scheduling/test_prefill.py",
    ],
    "host/scheduling/model_provider": [
        *("tests/host/scheduling/test_model_provider.py", "tests/host/scheduling/test_wired.py"),
        "tests/host/scheduling/test_context_length.py",
        "tests/host/scheduling/test_prompt_cache.py",
        "tests/host/scheduling/test_step_failures.py",
    ],
    "host/http/completion": ["tests/host/http/test_apis.py", "tests/host/http/test_completion.py"],
    "host/manager": [
        "tests/host/test_manager.py",
        "tests/host/scheduling/test_response_generator.py",
    ],
    "host/scheduling/pace": [
        "tests/host/scheduling/test_pace.py",
        "tests/host/scheduling/test_prefill.py",
    ],
    "host/patching/patches": ["tests/host/patching/test_patches.py"],
    "host/patching/probes": ["tests/host/patching/test_patches.py"],
    "host/hooks": [
        "tests/host/scheduling/test_response_generator.py",
        "tests/host/scheduling/test_prefill.py",
    ],
    "host/scheduling/waiting": [
        *("tests/host/scheduling/test_waiting.py", "tests/host/scheduling/test_reply.py"),
        "tests/host/scheduling/test_prefill.py",
    ],
    "host/http/request_checks": [
        *(
            "tests/host/http/test_apis.py",
            "tests/host/scheduling/test_response_generator.py",
        ),
        "tests/host/http/test_request_checks.py",
    ],
    "host/scheduling/response_generator": [
        *(
            "tests/host/scheduling/test_response_generator.py",
            "tests/host/scheduling/test_waiting.py",
        ),
        "tests/host/scheduling/test_generation_thread.py",
    ],
    "host": ["tests/host/test_startup.py"],
    "block": ["tests/test_block.py", "tests/api/test_session_keys.py", *_MATCHING],
    "match": ["tests/store/test_pool.py", *_MATCHING],
    "request/lookup": [
        *(*_LOOKUP, "tests/request/test_prefetch.py", "tests/request/test_costs.py"),
        *("tests/request/test_checkpoints.py", "tests/request/test_steps.py", *_ONE_KIND),
    ],
    "request/model": [
        *("tests/request/test_model.py", "tests/request/test_speed.py"),
        "tests/request/test_loading.py",
    ],
    "request/outcome": ["tests/request/test_outcome.py", *_LOOKUP, *_ONE_KIND],
    "request/saver": [*_LOOKUP, "tests/request/test_checkpoints.py", *_ONE_KIND],
    "request/serving": ["tests/request/test_computing.py", "tests/request/test_prefetch.py"],
    "store/block_store": [*_FOLDER, "tests/request/test_outcome.py"],
    "store/files": [
        *("tests/store/test_files.py", "tests/store/test_checkpoint_files.py"),
        *("tests/store/test_trouble.py", "tests/store/test_foreign_files.py"),
    ],
    "store/folder": [
        *("tests/store/test_foreign_files.py", *_FOLDER),
        *("tests/store/test_lock.py", "tests/store/test_writer.py"),
    ],
    "store/database": [*_FOLDER, "tests/store/test_index.py"],
    "store/pool": ["tests/store/test_pool.py", "tests/store/test_prefetch.py"],
    "store/disk": [*_FOLDER, "tests/store/test_trouble.py"],
    "store/records": [*_FOLDER, "tests/store/test_index.py"],
    "store/session_file": ["tests/cli/test_export.py"],
    "store/stored_sessions": [
        *("tests/store/test_stored_sessions.py", "tests/cli/test_sessions.py"),
        "tests/server/test_agents.py",
    ],
    "store/verify": [*_FOLDER, "tests/store/test_foreign_files.py", "tests/cli/test_store.py"],
    "store": _FOLDER,
}
"""The tests of a module or folder, if they are not `tests/<folder>/test_<module>.py`."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Add,
}


@dataclass(frozen=True)
class Mutant:
    """One change of one file: the text from `start` to `stop` (bytes) becomes `after`."""

    file: str
    line: int
    line_text: str
    before: str
    after: str
    start: int
    stop: int
    place: str
    """The column and the number of equal lines above."""

    @property
    def key(self) -> str:
        """A name that stays the same if the line moves within the file."""
        text = "\0".join((self.file, self.line_text, self.place, self.before, self.after))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        before, after = (" ".join(text.split())[:70] for text in (self.before, self.after))
        return f"{self.file}:{self.line}: {before}  ->  {after}"


def mutants_of(path: Path, root: Path = ROOT) -> list[Mutant]:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    n_before: Counter[bytes] = Counter()
    places = []
    for line in lines:
        places.append(n_before[line])
        n_before[line] += 1
    found = {}
    for node, new in _changes(tree):
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        stop = starts[node.end_lineno - 1] + node.end_col_offset
        before = source.encode()[start:stop].decode()
        text = lines[node.lineno - 1].decode().strip()
        name = str(path.relative_to(root))
        after = f"({new})" if isinstance(node, ast.expr) else new
        place = f"{node.col_offset}.{places[node.lineno - 1]}"
        found[start, stop, after] = Mutant(
            name, node.lineno, text, before, after, start, stop, place
        )
    return [found[where] for where in sorted(found)]


Change = tuple[ast.expr | ast.stmt, str]


def _changes(tree: ast.Module) -> Iterator[Change]:
    unread = {id(part) for node in ast.walk(tree) for part in _not_run(node)}
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if id(node) in unread:
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.expr):
            yield from _changed_expressions(node)
        elif isinstance(node, ast.stmt):
            yield from _changed_statements(node)


def _not_run(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node that need no test: annotations, decorators, messages."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield from node.decorator_list
    if isinstance(node, ast.FunctionDef) and node.returns:
        yield node.returns
    if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
        yield node.annotation
    if isinstance(node, ast.keyword) and node.arg == "strict":
        yield node.value  # `strict` of zip is an assertion
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom | ast.Assert):
        yield from ast.iter_child_nodes(node)
    if isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
    ):
        yield node
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        yield node
    if isinstance(node, ast.Expr) and ast.unparse(node).startswith("logger."):
        yield node


def _changed_expressions(node: ast.expr) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            ops = [*node.ops[:i], COMPARISONS[type(op)](), *node.ops[i + 1 :]]
            yield node, ast.unparse(ast.Compare(node.left, ops, node.comparators))
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield node, ast.unparse(ast.BoolOp(other, node.values))
        for i in range(len(node.values)):
            rest = [*node.values[:i], *node.values[i + 1 :]]
            yield node, ast.unparse(ast.BoolOp(node.op, rest) if len(rest) > 1 else rest[0])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node, ast.unparse(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield node, ast.unparse(ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield node, str(node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield node, ast.unparse(node.body)
        yield node, ast.unparse(node.orelse)
    elif isinstance(node, ast.Call):
        yield from _changed_calls(node)


def _changed_calls(node: ast.Call) -> Iterator[Change]:
    name = ast.unparse(node.func)
    if name in ("min", "max"):
        other = "max" if name == "min" else "min"
        yield node, ast.unparse(ast.Call(ast.Name(other), node.args, node.keywords))
    elif name not in ("isinstance", "getattr", "setattr", "hasattr") and len(node.args) > 1:
        first, second, *rest = node.args
        if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
            yield node, ast.unparse(ast.Call(node.func, [second, first, *rest], node.keywords))


def _changed_statements(node: ast.stmt) -> Iterator[Change]:
    if isinstance(node, ast.If | ast.While):
        test = node.test
        yield test, "False"
        if isinstance(node, ast.If):
            yield test, "True"
    elif isinstance(node, ast.Return) and node.value is not None:
        if ast.unparse(node.value) != "None":
            yield node, "return None"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, "pass"
    elif isinstance(node, ast.AugAssign | ast.Raise | ast.Delete):
        yield node, "pass"
    elif isinstance(node, ast.Continue | ast.Break):
        yield node, "pass"


def targets_of(file: str) -> list[str]:
    module = file.removeprefix(f"{PACKAGE}/").removesuffix(".py")
    folder, _, name = module.rpartition("/")
    if module in TESTS:
        return TESTS[module]
    own = f"tests/{folder}/test_{name}.py"
    return [own] if (ROOT / own).exists() else TESTS.get(folder, [f"tests/{folder}"])


class Tree:
    """A copy of the tree that one job changes and tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        # Compiled files are checked by hash, since two versions can have the same size and time.
        by_hash = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(folder / PACKAGE, quiet=2, invalidation_mode=by_hash)
        self.mutant: Mutant | None = None
        self._source = b""

    def start(self, targets: Sequence[str], loaded: Path | None = None) -> int:
        """Fork a process that runs tests in this tree; it exits with pytest's status.

        The process writes the names of the modules that the tests imported to `loaded`.
        """
        pid = os.fork()
        if pid:
            return pid
        status = 99
        try:
            os.setsid()  # the process group then includes the servers that tests start
            os.chdir(self.folder)
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            os.environ.update(PYTHONPATH=str(self.folder), HF_HUB_OFFLINE="1")
            sys.path.insert(0, str(self.folder))
            sys.dont_write_bytecode = True
            # Modules imported before the fork have no tests, so pytest need not rewrite them.
            options = ["-xq", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
            options += ["-p", "no:cacheprovider", "-m", "not slow"]
            status = int(pytest.main([*options, *targets]))
            if loaded is not None:
                loaded.write_text("\n".join(sys.modules), encoding="utf-8")
        finally:
            os._exit(status)

    def change(self, mutant: Mutant) -> bool:
        """Return False if the result is not valid Python."""
        path = self.folder / mutant.file
        self.mutant, self._source = mutant, path.read_bytes()
        changed = self._source[: mutant.start] + mutant.after.encode() + self._source[mutant.stop :]
        try:
            compile(changed, mutant.file, "exec")
        except SyntaxError:
            return False
        path.write_bytes(changed)
        return True

    def restore(self) -> None:
        assert self.mutant is not None
        (self.folder / self.mutant.file).write_bytes(self._source)


def accepted_mutants(path: Path = ACCEPTED) -> list[dict[str, str]]:
    """Each has `file`, `line` (the line's text) and `reason`; some have `after`, too."""
    found: list[dict[str, str]] = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    return found


def is_accepted(mutant: Mutant, accepted: Sequence[dict[str, str]]) -> bool:
    return any(
        mutant.file == one["file"]
        and mutant.line_text == one["line"]
        and one.get("after") in (None, mutant.after)
        for one in accepted
    )


def preload(names: Sequence[str]) -> None:
    """Import modules that the tests import, so that forked processes start with them.

    The project is not imported, because it will be changed. MLX is not imported, because its
    threads do not survive a fork. pytest loads its plugins itself.
    """
    project = (PACKAGE, "tests", "models_check", "patches_check", "benchmarks", "__main__")
    plugins = ("pytest", "_pytest", "hypothesis", "_hypothesis", "xdist", "anyio", "execnet")
    for name in names:
        if not name.startswith((*project, *plugins, "mlx")):
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def baselines(tree: Tree, files: Sequence[str]) -> dict[str, float]:
    """Return the time limit, in seconds, for the tests of each file; inf if the tests fail."""
    took: dict[str, float] = {}
    timeouts = {}
    loaded = tree.folder / "loaded-modules"
    for file in files:
        key = " ".join(targets_of(file))
        if key not in took:
            started = time.monotonic()
            _, status = os.waitpid(tree.start(targets_of(file), loaded), 0)
            took[key] = math.inf if status else time.monotonic() - started
            print(f"{key}: {f'{took[key]:.1f} s' if not status else 'the tests fail'}", flush=True)
            if not status:
                preload(loaded.read_text(encoding="utf-8").split("\n"))
        timeouts[file] = max(MIN_TIMEOUT_S, TIMES_BASELINE * took[key])
    return timeouts


def run(mutants: Sequence[Mutant], n_jobs: int, results: dict[str, dict[str, object]]) -> None:
    """Test mutants, `n_jobs` at a time, and save each result at once."""
    RESULTS.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        free = [Tree(Path(folder) / str(number)) for number in range(n_jobs)]
        timeouts = baselines(free[0], sorted({mutant.file for mutant in mutants}))
        busy: dict[int, tuple[Tree, float]] = {}
        pending = [one for one in reversed(mutants) if timeouts[one.file] < math.inf]

        def note(mutant: Mutant, result: str) -> None:
            results[mutant.key] = {**asdict(mutant), "result": result}
            RESULTS.write_text(json.dumps(results, indent=1), encoding="utf-8")
            if result == "survived":
                print(mutant, flush=True)

        while pending or busy:
            while free and pending:
                mutant = pending.pop()
                tree = free.pop()
                if not tree.change(mutant):
                    note(mutant, "killed")
                    free.append(tree)
                    continue
                until = time.monotonic() + timeouts[mutant.file]
                busy[tree.start(targets_of(mutant.file))] = (tree, until)
            time.sleep(0.02)
            for pid, (tree, until) in list(busy.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if not ended and time.monotonic() < until:
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                if not ended:
                    os.waitpid(pid, 0)
                assert tree.mutant is not None
                note(tree.mutant, "timeout" if not ended else "killed" if status else "survived")
                tree.restore()
                del busy[pid]
                free.append(tree)


def main() -> int:
    """Return 1 if a mutant survived without a reason."""
    parser = argparse.ArgumentParser(description="Test the tests: change the source and run them.")
    parser.add_argument("--module", action="append", help="only files with this text in the path")
    parser.add_argument("--sample", type=int, metavar="N", help="only N mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--jobs", type=int, default=1, help="number of pytest runs at a time")
    parser.add_argument("--again", action="store_true", help="also test mutants with a result")
    parser.add_argument("--survivors", action="store_true", help="test the survivors again")
    args = parser.parse_args()
    results: dict[str, dict[str, object]] = {}
    if RESULTS.exists():
        results = json.loads(RESULTS.read_text(encoding="utf-8"))
    files = [ROOT / PACKAGE / "match.py"]
    files += (path for name in FOLDERS for path in sorted((ROOT / PACKAGE / name).rglob("*.py")))
    wanted = [
        mutant
        for path in files
        if not args.module or any(part in str(path.relative_to(ROOT)) for part in args.module)
        for mutant in mutants_of(path)
    ]
    accepted = accepted_mutants()
    wanted = [mutant for mutant in wanted if not is_accepted(mutant, accepted)]
    if args.sample is not None:
        wanted = random.Random(args.seed).sample(wanted, min(args.sample, len(wanted)))
    known = {key: str(result["result"]) for key, result in results.items()}
    if args.survivors:
        pending = [mutant for mutant in wanted if known.get(mutant.key) == "survived"]
    else:
        pending = [mutant for mutant in wanted if args.again or mutant.key not in known]
    run(pending, args.jobs, results)
    survivors = [
        mutant for mutant in wanted if results.get(mutant.key, {}).get("result") == "survived"
    ]
    n_tested = sum(mutant.key in results for mutant in wanted)
    print(f"{len(survivors)} of {n_tested} mutants survived")
    print(*survivors, sep="\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
