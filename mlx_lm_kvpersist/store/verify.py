"""Check a store from end to end: every file, every row, and that they agree.

Reading takes no lock, so a server goes on. Whatever looks wrong is checked again under the lock,
because a turn that is being saved looks like a fault for a moment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path

from ..block import Block, Checkpoint
from ..errors import StoreError
from .disk import DiskStore
from .files import read_file
from .folder import OwnFiles, StoreLock
from .index import Index
from .rebuild import rebuild_index
from .records import Session, has_sidecar, read_sidecar, sidecar_path


class Fault(str, Enum):
    """What can be wrong with a store."""

    CORRUPT = "corrupt"
    """The file of a block or a checkpoint is not what its name, metadata or checksum promise."""
    UNREADABLE = "unreadable"
    """The file of a block or a checkpoint cannot be read now: it may be whole."""
    MISSING = "missing"
    """A block or checkpoint of the index has no file."""
    UNREACHABLE = "unreachable"
    """A block's parent is not there, or ends elsewhere; a checkpoint's block is not there."""
    MISMATCH = "mismatch"
    """The index says something else of a block or checkpoint than its file, which is whole."""
    ORPHAN = "orphan"
    """A file that the index does not know."""
    SESSION = "session"
    """A session's last block is missing, or its file would mislead a rebuild."""
    INDEX = "index"
    """The index has rows that cannot be read, or totals that are not those of its rows."""


@dataclass(frozen=True)
class Problem:
    """Something that is wrong. `subject` is a key as hex, a path or a session's id."""

    fault: Fault
    subject: str
    reason: str
    check: Callable[[], Problem | None] = field(default=lambda: None, compare=False, repr=False)
    """Look again."""


def find_problems(
    folder: Path, index: Index, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Problem]:
    """Return what is wrong with a store; `progress` is called with the files read and all files."""
    blocks, checkpoints = sorted(index.keys()), sorted(index.keys("checkpoints"))
    n_files = len(blocks) + len(checkpoints)
    checks = [
        *(partial(_check_block, folder, index, key) for key in blocks),
        *(partial(_check_block, folder, index, key, is_checkpoint=True) for key in checkpoints),
        *(partial(_check_index, index, fault) for fault in index.faults()),
        *(
            partial(_check_file, folder, index, path)
            for name in ("blocks", "checkpoints", "sessions")
            for path in sorted(index.files.paths(name))
        ),
        *(partial(_check_session, folder, index, session.id) for session in index.sessions()),
    ]
    suspects = []
    for number, check in enumerate(checks, start=1):
        if check() is not None:
            suspects.append(check)
        if number <= n_files:
            progress(number, n_files)
    if not suspects:
        return []
    with StoreLock(folder / "lock").held():
        return [
            replace(problem, check=check) for check in suspects if (problem := check()) is not None
        ]


def fix_problems(disk: DiskStore, problems: list[Problem]) -> None:
    """Take out of use what is wrong, and what can no longer be reached without it.

    Bad files of blocks and checkpoints go to quarantine. Where file and index disagree, the file is
    believed.
    """
    with disk.lock.held():
        if any(problem.fault in (Fault.MISMATCH, Fault.INDEX) for problem in problems):
            # First: a file that a damaged row does not name is not left behind.
            rebuild_index(disk.files)
        # The fault may be gone since, or be another one.
        now = [again for problem in problems if (again := problem.check())]
        for problem in now:
            if problem.fault is Fault.CORRUPT:
                disk.quarantine(bytes.fromhex(problem.subject), problem.reason)
            elif problem.fault is Fault.UNREACHABLE:
                disk.forget(bytes.fromhex(problem.subject))
        disk.sweep()  # rows without a file, files without a row
        for session in disk.index.sessions():
            if _end_of(disk.index, session) is not None:
                disk.remove_session(session)
            elif _check_session(disk.folder, disk.index, session.id) is not None:
                disk.set_pinned(session, session.pinned)  # writes its file anew
        disk.index.database.empty_log()


def _check_index(index: Index, fault: str) -> Problem | None:
    return Problem(Fault.INDEX, index.path.name, fault) if fault in index.faults() else None


def _check_block(
    folder: Path, index: Index, key: bytes, is_checkpoint: bool = False
) -> Problem | None:
    """Check the file and the row of a block or a checkpoint."""
    problem = partial(Problem, subject=key.hex())
    if key not in index:
        return None
    path = index.files.path_of(key, Checkpoint.folder if is_checkpoint else Block.folder)
    try:
        block, root, _ = read_file(path, index.files)
        size = path.stat().st_size
    except FileNotFoundError:
        return problem(Fault.MISSING, reason=f"{path.name} is not there")
    except StoreError as error:
        return problem(Fault.CORRUPT, reason=str(error))
    except (OSError, MemoryError) as error:
        return problem(Fault.UNREADABLE, reason=f"{path.name}: {error}")
    parent_key = block.block if isinstance(block, Checkpoint) else block.parent
    parent = index.block(parent_key)
    if isinstance(block, Checkpoint):
        if parent is not None and parent[1] != root.key:
            reason = f"its block {parent_key.hex()} belongs to another model"
            return problem(Fault.CORRUPT, reason=reason)
        is_as_indexed = (block, size) in index.checkpoints([parent_key])
    else:
        row = index.block(key)
        is_as_indexed = (block, root.key, size) == row and astuple(block) == astuple(row[0])
    if not is_as_indexed:
        return problem(Fault.MISMATCH, reason=f"{path.name}: file and index disagree")
    if parent is None and (is_checkpoint or parent_key != root.key):
        what = "block" if is_checkpoint else "parent"
        return problem(Fault.UNREACHABLE, reason=f"its {what} {parent_key.hex()} is not there")
    stop = parent[0].stop if parent is not None else 0
    if isinstance(block, Block) and block.start != stop:
        return problem(
            Fault.UNREACHABLE,
            reason=f"it begins at token {block.start}, and its parent ends at {stop}",
        )
    return None


def _check_file(folder: Path, index: Index, path: Path) -> Problem | None:
    if path.parent == folder / "sessions":
        is_indexed = path.suffix == ".json" and index.session(path.stem) is not None
    else:
        key, table = index.files.key_of(path), path.relative_to(folder).parts[0]
        is_indexed = bool(index.ask(f"SELECT 1 FROM {table} WHERE key = ?", key))
    if is_indexed or not path.exists():
        return None
    return Problem(Fault.ORPHAN, str(path), f"{path.name}: the index does not know it")


def _check_session(folder: Path, index: Index, session_id: str) -> Problem | None:
    session = index.session(session_id)
    if session is None:
        return None
    reason = _end_of(index, session)
    if reason is None and (has_sidecar(session)):
        reason = _disagreement(sidecar_path(folder, session_id), session, index.files)
    return None if reason is None else Problem(Fault.SESSION, session_id, reason)


def _end_of(index: Index, session: Session) -> str | None:
    """Say what is wrong with where a session ends."""
    row = index.block(session.leaf)
    if row is None:
        return f"its last block {session.leaf.hex()} is not there"
    if row[1] != session.root:
        return f"its last block {session.leaf.hex()} belongs to another model"
    return None


def _disagreement(path: Path, session: Session, files: OwnFiles) -> str | None:
    """Say what a rebuilt index would get wrong of a session."""
    try:
        sidecar = read_sidecar(path, files)
    except (ValueError, TypeError, KeyError, OSError) as error:
        return f"{path.name} cannot be read: {error}"
    for name in ("name", "pinned", "root", "leaf"):
        if getattr(sidecar, name) != getattr(session, name):
            return f"{path.name}: file and index disagree on {name}"
    return None
