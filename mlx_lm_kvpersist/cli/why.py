"""`mlx-lm-kvpersist why`: what the last requests to a running server reused, and why not more."""

from __future__ import annotations

import argparse
import json
import os
from http.client import HTTPConnection, HTTPException
from typing import Any

from ..api.admin import KEY_VARIABLE, REQUESTS_PATH
from ..errors import KVPersistError
from .output import console, local_time, print_json, print_table, shown


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit status. Raises KVPersistError when the server is silent."""
    records = _ask(args.host, args.port)
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
    else:
        _list(records)
    return 0


def _ask(host: str, port: int) -> list[dict[str, Any]]:
    connection = HTTPConnection(host, port, timeout=10)
    try:
        key = os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connection.request("GET", REQUESTS_PATH, headers=headers)
        response = connection.getresponse()
        body = response.read()
    except (OSError, HTTPException) as error:
        raise KVPersistError(
            f"no answer from {host}:{port} ({error}); use --host and --port"
        ) from error
    finally:
        connection.close()
    if response.status == 403:
        raise KVPersistError(f"{host}:{port} refused: {json.loads(body)['error']}")
    if response.status != 200:
        raise KVPersistError(
            f"{host}:{port} answered {response.status} to {REQUESTS_PATH}; "
            "is it mlx_lm.server with --plugin kvpersist?"
        )
    records: list[dict[str, Any]] = json.loads(body)
    return records


def _list(records: list[dict[str, Any]]) -> None:
    rows = [
        [
            record["id"],
            local_time(record["received"]),
            shown(record["session"] or "-", 24),
            record["outcome"],
            record["tier"],
            f"{record['reused_tokens']:,}",
            f"{record['prompt_tokens']:,}",
            record["reason"] or "",
        ]
        for record in records
    ]
    columns = ["id", "received", "session", "outcome", "tier", "reused", "of", "why not more"]
    print_table(columns, rows, right="reused of")


def _explain(record: dict[str, Any]) -> None:
    out = console()
    out.print(
        f"{record['id']}: {record['outcome']}, {record['reused_tokens']:,} of "
        f"{record['prompt_tokens']:,} tokens reused ({record['tier']}), "
        f"{record['restored_tokens']:,} from disk in {record['restore_ms']} ms"
    )
    if record["reason"]:
        detail = f": {record['detail']}" if record["detail"] else ""
        out.print(f"Not more, because: {record['reason']}{detail}")
    divergence = record["divergence"]
    if not divergence:
        return
    if divergence["message"] is None:
        where = f"between messages, at character {divergence['char']:,} of the prompt"
    else:
        where = (
            f"in message {divergence['message']} ({divergence['role']}), at its character "
            f"{divergence['message_char']:,}"
        )
    out.print(f"It parts from the nearest stored branch {where}.")
    if divergence["stored"] is not None:
        out.print(f"  stored: {shown(divergence['stored'], 120)}")
        out.print(f"  asked:  {shown(divergence['asked'], 120)}")
