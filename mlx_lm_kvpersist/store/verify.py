"""Check a store from end to end: every file, every row, and that they agree.

Reading takes no lock. A suspect record is checked again under the lock: a turn that is being saved
looks like a fault for a moment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path

from ..block import Block, Checkpoint, Record, Root
from ..errors import StoreError
from .disk import DiskStore, rebuild_index
from .files import FOLDERS, read_file
from .folder import StoreLock
from .index import Index
from .records import Session, has_sidecar, read_sidecar, sidecar_path


class Fault(str, Enum):
    """The kinds of fault that `find_problems` finds; the value is the word that users see."""

    CORRUPT = "corrupt"
    """The file of a block or a checkpoint does not match its name, metadata or checksum."""
    UNREADABLE = "unreadable"
    """The file of a block or a checkpoint cannot be read now: it may be intact."""
    MISSING = "missing"
    """A block or checkpoint of the index has no file."""
    UNREACHABLE = "unreachable"
    """A block's parent is missing or does not end where the block begins, or a checkpoint's block
    is missing."""
    MISMATCH = "mismatch"
    """The index contradicts the file of a block or checkpoint, and the file is intact."""
    ORPHAN = "orphan"
    """A file that the index does not know."""
    SESSION = "session"
    """A session's last block is missing, or the session's file would mislead a rebuild."""
    INDEX = "index"
    """The index has rows that cannot be read, or totals that do not match its rows."""


@dataclass(frozen=True)
class Problem:
    """A fault. `subject` is a key as hex, a path or a session's id; `check` repeats the check."""

    fault: Fault
    subject: str
    reason: str
    check: Callable[[], Problem | None] = field(default=lambda: None, compare=False, repr=False)


def find_problems(
    folder: Path, index: Index, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Problem]:
    """Return a store's problems; `progress` gets the numbers of files read and of all files."""
    records = [(key, kind) for kind in FOLDERS for key in sorted(index.keys(kind))]
    paths = (path for kind in (*FOLDERS, "sessions") for path in sorted(index.files.paths(kind)))
    checks = [
        *(partial(_check_record, index, key, kind) for key, kind in records),
        *(partial(_check_index, index, fault) for fault in index.faults()),
        *(partial(_check_file, index, path) for path in paths),
        *(partial(_check_session, index, session.id) for session in index.sessions()),
    ]
    suspects = []
    for number, check in enumerate(checks, start=1):
        if check() is not None:
            suspects.append(check)
        if number <= len(records):
            progress(number, len(records))
    if not suspects:
        return []
    with StoreLock(folder / "lock").held():
        problems = ((check(), check) for check in suspects)
        return [replace(problem, check=check) for problem, check in problems if problem]


def fix_problems(disk: DiskStore, problems: list[Problem]) -> None:
    """Rebuild a wrong index, move bad files to quarantine, and remove unreachable records.

    Rows without files, files without rows, and sessions without their last block are removed, too.
    A session's wrong file is written again. Files that cannot be read now stay.
    """
    with disk.lock.held():
        if any(problem.fault in (Fault.MISMATCH, Fault.INDEX) for problem in problems):
            # First, because a damaged row may not name its files, which would stay.
            rebuild_index(disk.files)
        # The fault may have ended, or be another fault by now.
        for problem in [again for problem in problems if (again := problem.check())]:
            if problem.fault is Fault.CORRUPT:
                disk.quarantine(bytes.fromhex(problem.subject), problem.reason)
            elif problem.fault is Fault.UNREACHABLE:
                disk.forget(bytes.fromhex(problem.subject))
        disk.sweep()
        for session in disk.index.sessions():
            if _wrong_end(disk.index, session):
                disk.remove_session(session)
            elif _check_session(disk.index, session.id):
                disk.set_pinned(session, session.pinned)  # writes its file again
        disk.index.database.empty_log()


def _check_index(index: Index, fault: str) -> Problem | None:
    return Problem(Fault.INDEX, index.path.name, fault) if fault in index.faults() else None


def _check_record(index: Index, key: bytes, kind: str) -> Problem | None:
    if key not in index:
        return None
    path = index.files.path_of(key, kind)
    try:
        record, root, _ = read_file(path, index.files)
        fault = _record_fault(index, record, root, path.stat().st_size)
    except FileNotFoundError:
        fault = Fault.MISSING, f"{path.name} is missing"
    except StoreError as error:
        fault = Fault.CORRUPT, str(error)
    except (OSError, MemoryError) as error:
        fault = Fault.UNREADABLE, f"{path.name}: {error}"
    return Problem(fault[0], key.hex(), fault[1]) if fault else None


def _record_fault(
    index: Index, record: Record, root: Root, n_bytes: int
) -> tuple[Fault, str] | None:
    """Return a fault of a record whose file is intact, if it has one."""
    if isinstance(record, Checkpoint):
        what, parent_key = "block", record.block
        is_as_indexed = (record, n_bytes) in index.checkpoints([parent_key])
    else:
        what, parent_key = "parent", record.parent
        row = index.block(record.key)
        # `==` of blocks ignores their text.
        is_as_indexed = (record, root.key, n_bytes) == row and astuple(record) == astuple(row[0])
    parent = index.block(parent_key)
    if isinstance(record, Checkpoint) and parent and parent[1] != root.key:
        return Fault.CORRUPT, f"its block {parent_key.hex()} belongs to another model"
    if not is_as_indexed:
        return Fault.MISMATCH, f"{record}: file and index disagree"
    if parent is None and parent_key != root.key:
        return Fault.UNREACHABLE, f"its {what} {parent_key.hex()} is missing"
    stop = parent[0].stop if parent else 0
    if isinstance(record, Block) and record.start != stop:
        reason = f"it begins at token {record.start}, and its parent ends at {stop}"
        return Fault.UNREACHABLE, reason
    return None


def _check_file(index: Index, path: Path) -> Problem | None:
    kind = path.relative_to(index.files.folder).parts[0]
    if kind == "sessions":
        is_indexed = path.suffix == ".json" and index.session(path.stem) is not None
    else:
        key = index.files.encryption.key_of(path.stem)
        is_indexed = bool(index.ask(f"SELECT 1 FROM {kind} WHERE key = ?", key))
    if is_indexed or not path.exists():
        return None
    return Problem(Fault.ORPHAN, str(path), f"{path.name}: the index does not know it")


def _check_session(index: Index, session_id: str) -> Problem | None:
    session = index.session(session_id)
    if session is None:
        return None
    reason = _wrong_end(index, session) or _wrong_sidecar(index, session)
    return Problem(Fault.SESSION, session_id, reason) if reason else None


def _wrong_end(index: Index, session: Session) -> str | None:
    row = index.block(session.leaf)
    if row is None:
        return f"its last block {session.leaf.hex()} is missing"
    if row[1] != session.root:
        return f"its last block {session.leaf.hex()} belongs to another model"
    return None


def _wrong_sidecar(index: Index, session: Session) -> str | None:
    if not has_sidecar(session):
        return None
    path = sidecar_path(index.files.folder, session.id)
    try:
        sidecar = read_sidecar(path, index.files)
    except (ValueError, OSError) as error:
        return f"{path.name} cannot be read: {error}"
    for name in ("name", "pinned", "root", "leaf"):
        if getattr(sidecar, name) != getattr(session, name):
            return f"{path.name}: file and index disagree on {name}"
    return None
