"""`mlx-lm-kvpersist why`: what the last requests reused, and why not more."""

from __future__ import annotations

import argparse
from typing import Any

from ..api.admin import REQUESTS_PATH
from ..errors import KVPersistError
from .asking import ask
from .opening import folder_of, reading
from .output import console, local_time, print_json, print_table, shown

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
    if args.json:
        print_json(records if args.request is None else records[0])
    elif args.request is not None:
        _explain(records[0])
    elif records:
        rows = [[local_time(each["received"]), each["id"], _sentence(each)] for each in records]
        print_table(["received", "id", "what was reused"], rows)
    else:
        console().print(f"no request yet in {args.url or folder_of(args)}")
    return 0


def _sentence(record: Record) -> str:
    return shown(record["sentence"], 400)


def _explain(record: Record) -> None:
    out = console()
    out.print(f"{record['id']}, {local_time(record['received'])}: {_sentence(record)}")
    out.print(f"Model: {shown(record['model'], 200)}")
    if (first_token_s := record.get("first_token_s")) is not None:
        out.print(f"First token after {first_token_s:.2f} s")
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
    out.print(f"The prompt differs from the nearest stored conversation {where}:")
    if divergence["stored"] is not None:
        out.print(f"  stored: {shown(divergence['stored'], 120)}")
        out.print(f"  asked:  {shown(divergence['asked'], 120)}")
