"""`mlx-lm-kvpersist sessions` and `warm`: list, show, remove, pin, move and compute sessions."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

from ..api.admin import MAX_TITLE_CHARS
from ..api.agents import WARM_PATH, read_prompt, session_name
from ..block import Checkpoint
from ..config import encryption_of, limits_of
from ..errors import StoreError
from ..store.disk import DiskStore
from ..store.folder import whole_file
from ..store.index import Index
from ..store.records import Session, Totals
from ..store.session_file import SessionFile, export_parts, export_records, import_session
from ..units import show_bytes
from .opening import changing, reading
from .output import (
    Report,
    age,
    amount,
    by_id,
    called,
    counted,
    counts,
    named,
    print_tsv,
    progress,
    record,
    records,
    shown,
    table,
    utc_time,
)
from .servers import ask

_EXCERPT_CHARS = 240
_COMPUTED_S = 3600.0
_TSV_COLUMNS = (
    "id name title model precision namespace tokens bytes blocks pinned used client words".split()
)
_ORDERS: dict[str, Callable[[Index, Session], Any]] = {
    "used": lambda index, session: -session.used,
    "size": lambda index, session: -describe(index, session)["bytes"],
    "tokens": lambda index, session: -session.n_tokens,
    "name": lambda index, session: (not (name := _name(index, session)), name.casefold()),
}


def choose(index: Index, wanted: str) -> Session:
    """Return the session whose id, name or title is `wanted`.

    The beginning or the end of an id is enough. Whole ids are compared first, then names, titles
    and parts of ids. Raises StoreError unless one session matches.
    """
    sessions = index.sessions()
    named = [session for session in sessions if session.name == wanted]
    named = named or [one for one in sessions if wanted and _title(index, one) == wanted]
    chosen = by_id([session.id for session in sessions], wanted)
    with_id = [session for session in sessions if session.id in chosen]
    matches = with_id if chosen == [wanted] else named or with_id
    if not matches:
        raise StoreError(
            f"no session has the name or the title {shown(wanted)}, or an id that begins or ends "
            "with it (first words are not names); `mlx-lm-kvpersist sessions list` shows all"
        )
    if len(matches) > 1:
        what = "branches have the name" if named else "ids begin or end with"
        ids = ", ".join(session.id for session in matches)
        raise StoreError(
            f"{len(matches)} {what} {shown(wanted)}; say which by id: {ids} "
            "(`mlx-lm-kvpersist sessions show ID` describes one)"
        )
    return matches[0]


def _title(index: Index, session: Session) -> str | None:
    return index.state.note(session.id).get("title")


def _name(index: Index, session: Session) -> str:
    return called(session.name, index.state.note(session.id))


def describe(index: Index, session: Session) -> dict[str, Any]:
    chain = index.outline([session.leaf])
    root = index.root(session.root)
    note = index.state.note(session.id)
    return {
        "id": session.id,
        "name": session.name,
        **{name: note.get(name) or None for name in ("title", "client", "words")},
        "model": root.model if root else None,
        "fingerprint": root.fingerprint if root else None,
        "precision": root.layout if root else None,
        "namespace": root.namespace if root else None,
        "isolated": bool(root and root.session),
        "text_stored": bool(root and root.with_text),
        "tokens": session.n_tokens,
        "blocks": len(chain),
        "checkpoints": sum(n_checkpoints for *_, n_checkpoints in chain),
        "bytes": sum(n_bytes for _, _, n_bytes, *_ in chain),
        "pinned": session.pinned,
        "created": utc_time(session.created),
        "used": utc_time(session.used),
    }


def list_all(args: argparse.Namespace) -> Report:
    folder, now = args.kvpersist_dir, time.time()
    with reading(args) as index:
        found = index.state.matching(index.sessions(), args.text or "")
        found.sort(key=partial(_ORDERS[args.sort], index))
        listed = [(session, _name(index, session)) for session in found[: args.limit]]
        facts = [describe(index, session) for session, _ in listed]
    content = {"folder": str(folder), "sessions": facts}
    if not listed:
        where = "the name, the title, the first words, the client or the id"
        which = f" with {shown(args.text)} in {where}" if args.text else ""
        return Report(content, f"no sessions{which} in {folder}")
    if not args.json and not sys.stdout.isatty():
        print_tsv(facts, *_TSV_COLUMNS)
        return Report(content)
    rows = [
        [
            *(session.id, name or "-", f"{session.n_tokens:,}", show_bytes(fields["bytes"])),
            *(age(now - session.used), "pinned" if session.pinned else ""),
        ]
        for (session, name), fields in zip(listed, facts, strict=True)
    ]
    columns = ["id", "session", "tokens", "size", "used", ""]
    n_more = len(found) - len(listed)
    more = [f"… and {counted(n_more, 'more session')}"] if n_more else []
    return Report(content, table(columns, rows, "tokens size used", "session"), *more)


def rename(args: argparse.Namespace) -> Report:
    title = args.title.strip()
    if len(title) > MAX_TITLE_CHARS:
        raise StoreError(f"a title has at most {MAX_TITLE_CHARS} characters, not {len(title):,}")
    with changing(args) as disk, disk.lock.held():
        session = choose(disk.index, args.session)
        disk.index.state.add_note(session.id, title=title)
        facts = describe(disk.index, session)
    what = f"is called {shown(title)}" if title else "has no title any more"
    return Report(facts, f"{named(session, {})}  {what}")


def show(args: argparse.Namespace) -> Report:
    with reading(args) as index:
        session = choose(index, args.session)
        facts = describe(index, session)
        chain = index.chain(session.leaf)
        checkpoints = index.checkpoints([node.key for node, _ in chain])
    text = "".join(node.text for node, _ in chain)
    facts["text_start"] = text[:_EXCERPT_CHARS] if facts["text_stored"] else None
    facts["text_end"] = text[-_EXCERPT_CHARS:] if facts["text_stored"] else None
    blocks: list[dict[str, Any]] = [
        {
            "key": node.key.hex(),
            "start": node.start,
            "tokens": node.n_tokens,
            "bytes": n_bytes,
            "checkpoints": [
                {"key": one.key.hex(), "kind": one.kind, "tokens": one.n_tokens, "bytes": size}
                for one, size in checkpoints
                if one.block == node.key
            ],
        }
        for node, n_bytes in chain
    ]
    rows = [
        {**block, "checkpoints": ", ".join(one["kind"] for one in block["checkpoints"])}
        for block in blocks
    ]
    columns = ("key", "start", "tokens", "bytes", "checkpoints")
    return Report({**facts, "chain": blocks}, record(facts), "", records(rows, *columns))


def rm(args: argparse.Namespace) -> Report:
    if bool(args.sessions) == args.all:
        args.error("name the sessions to remove, or say --all")
    folder = args.kvpersist_dir
    if args.all and not args.yes:
        args.error(f"--all removes every session of {folder}; add --yes")
    with changing(args) as disk, disk.lock.held():
        index = disk.index
        chosen = index.sessions() if args.all else [choose(index, name) for name in args.sessions]
        chosen = list(dict.fromkeys(chosen))
        names = [
            named(session, index.state.note(session.id)) + " (pinned)" * session.pinned
            for session in chosen
        ]
        owners = [(session.name, index.namespace(session)) for session in chosen]
        before = disk.index.totals()
        for session in chosen:
            disk.remove_session(session)
        disk.index.state.forget_requests(None if args.all else owners)
        if args.all:
            disk.index.state.trim_replies(0)
            for key in index.keys("blocks"):  # of no session, e.g. after a kill during a reply
                disk.forget(key)
        is_overwritten = disk.index.database.empty_log()
        freed = before - disk.index.totals()
    reader = "The index keeps their text while another program reads it."
    removed = [{"id": session.id, "name": session.name} for session in chosen]
    content = {"removed": removed, **counts(freed), "bytes": freed.n_bytes}
    return Report(
        {**content, "is_overwritten": is_overwritten},
        *(f"removed {name}" for name in names),
        f"freed {show_bytes(freed.n_bytes)}: {amount(freed)}",
        "A server that runs now still has their blocks in RAM, and may use them until it is "
        "restarted. While a server runs, delete on its page instead: the page also frees RAM.",
        *([] if is_overwritten else [reader]),
    )


def pin(args: argparse.Namespace) -> Report:
    with changing(args) as disk, disk.lock.held():
        session = disk.set_pinned(choose(disk.index, args.session), args.subcommand == "pin")
        what = "is pinned" if session.pinned else "is no longer pinned"
        return _changed(disk.index, session, what)


def _changed(index: Index, session: Session, what: str, **more: Any) -> Report:
    line = f"{named(session, index.state.note(session.id))}  {what}"
    return Report({**describe(index, session), **more}, line)


def export(args: argparse.Namespace) -> Report:
    target = args.file
    with reading(args) as index, progress("export") as on_progress:
        session = choose(index, args.session)
        if target.exists() and not args.force:
            raise StoreError(f"{target} exists; choose another file, or replace it with --force")
        exported = export_records(index, session)
        n_bytes, parts = export_parts(index, session, exported, on_progress)
        with whole_file(target, fsync=True) as file:
            file.writelines(parts)
        what = f"is now in {target}, {show_bytes(n_bytes)}"
        return _changed(index, session, what, file=str(target), file_bytes=n_bytes)


def load(args: argparse.Namespace) -> Report:
    folder = args.kvpersist_dir
    with progress("check") as on_progress:
        source = SessionFile(args.file, on_progress)
    limits, encryption = limits_of(args, folder), encryption_of(args)
    with closing(source), closing(DiskStore(folder, limits, encryption=encryption)) as disk:
        session, new, is_new = import_session(disk, source)
        n_checkpoints = sum(isinstance(item, Checkpoint) for item in new)
        written = Totals(len(new) - n_checkpoints, 0, n_checkpoints)
        n_written = {f"{kind}_written": n for kind, n in counts(written).items()}
        what = f"{'is added' if is_new else 'was there'}; written: {amount(written)}"
        return _changed(disk.index, session, what, is_new=is_new, **n_written)


def warm(args: argparse.Namespace) -> Report:
    name = args.name or session_name(args.file)
    request = {"name": name, "request": read_prompt(args.file)}
    done = ask(args.url, WARM_PATH, request, timeout_s=_COMPUTED_S)
    line = f"{done['id']}  {shown(done['name'])}  is computed and pinned: {done['tokens']:,} tokens"
    return Report(done, line)
