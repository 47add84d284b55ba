"""`mlx-lm-kvpersist why`: what the last requests reused, and why not more."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from ..api.admin import REQUESTS_PATH
from ..errors import KVPersistError
from .asking import ask
from .opening import folder_of, reading
from .output import local_time, shown, table, tell

Record = dict[str, Any]


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit status. Raises KVPersistError when nobody can say."""
    records: list[Record]
    if args.url is not None:
        records = ask(args.url, REQUESTS_PATH)
    else:
        with reading(folder_of(args)) as index:
            records = index.state.requests()
    if args.request is not None:
        records = [record for record in records if record["id"].endswith(args.request)]
        if not records:
            raise KVPersistError(
                f"no request {args.request!r} among the last ones; leave it out to list them"
            )
        tell(args, records[0], *_explained(records[0]))
        return 0
    rows = [[local_time(each["received"]), each["id"], _sentence(each)] for each in records]
    listed = table(["received", "id", "what was reused"], rows)
    tell(args, records, listed if rows else f"no request yet in {args.url or folder_of(args)}")
    return 0


def _sentence(record: Record) -> str:
    return shown(record["sentence"], 400)


def _explained(record: Record) -> Iterator[str]:
    """Yield what is known of a request, a line each."""
    yield f"{record['id']}, {local_time(record['received'])}: {_sentence(record)}"
    yield f"Model: {shown(record['model'], 200)}"
    if precision := record.get("precision"):
        yield f"Precision: {shown(precision, 400)}"
    if (first_token_s := record.get("first_token_s")) is not None:
        yield f"First token after {first_token_s:.2f} s"
    divergence = record["divergence"]
    if not divergence:
        return
    if divergence["message"] is None:
        where = f"between messages, at character {divergence['char']:,} of the prompt"
    else:
        where = (
            f"in message {divergence['message']} ({shown(divergence['role'] or '?')}), at its "
            f"character {divergence['message_char']:,}"
        )
    yield f"The prompt differs from the nearest stored conversation {where}:"
    if divergence["stored"] is not None:
        yield f"  stored: {shown(divergence['stored'], 120)}"
        yield f"  asked:  {shown(divergence['asked'], 120)}"
