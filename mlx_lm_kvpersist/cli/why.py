"""`mlx-lm-kvpersist why`: what the last requests reused, and why not more."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

from ..api.admin import REQUESTS_PATH, STATS_PATH
from ..errors import KVPersistError
from ..units import show_bytes
from .opening import reading
from .output import Report, by_id, local_time, shown, table, utc_time
from .servers import ask

Record = dict[str, Any]
WRITTEN_S = 2.0
"""How long to wait for a record: a server writes it to the store shortly after the reply."""
_LOOK_AGAIN_S = 0.05
_NO_PARTS = ("total", "weights", "active", "waiting", "pressure")
"""Fields of the statistics' `memory` that are not parts of the total."""


def run(args: argparse.Namespace) -> Report:
    records: list[Record]
    stats: Record = {}
    if args.url is not None:
        records, stats = ask(args.url, REQUESTS_PATH), ask(args.url, STATS_PATH)
        store = stats["store"]
    else:
        with reading(args) as index:
            ends_s = time.monotonic() + WRITTEN_S
            records = index.state.requests()
            while args.request and not _chosen(records, args.request) and time.monotonic() < ends_s:
                time.sleep(_LOOK_AGAIN_S)
                records = index.state.requests()
            store = {"written_last_hour_bytes": index.state.written_last_hour()}
    found = records if args.request is None else _chosen(records, args.request)
    content = [{**record, "received": utc_time(record["received"])} for record in found]
    if args.request is not None:
        if not found:
            raise KVPersistError(
                f"no request {args.request!r} among the last requests: no id begins or ends with "
                "it; leave out the id to list them"
            )
        if len(found) > 1:
            raise KVPersistError(
                f"{len(found)} ids begin or end with {shown(args.request)}; type more of the id"
            )
        return Report(content[0], *_explained(found[0]))
    rows = [
        [local_time(record["received"]), record["id"], shown(record["sentence"], 400)]
        for record in records
    ]
    listed = table(["received", "id", "what was reused"], rows)
    none = f"no request yet in {args.url or args.kvpersist_dir}"
    if not args.url:
        none += "; for a server with another folder, say --kvpersist-dir FOLDER or --url"
    if not rows:
        return Report(content, none)
    return Report(content, listed, "", *_sums(records, store, stats.get("memory")))


def _chosen(records: list[Record], wanted: str) -> list[Record]:
    ids = by_id([record["id"] for record in records], wanted)
    return [record for record in records if record["id"] in ids]


def _sums(records: list[Record], store: Record, memory: Record | None) -> Iterator[str]:
    looked_up = [record for record in records if record["outcome"] != "STOCK"]
    n_prompt, n_reused, n_restored = (
        sum(record[f"{which}_tokens"] for record in looked_up)
        for which in ("prompt", "reused", "restored")
    )
    if n_prompt:
        yield (
            f"Of {n_prompt:,} tokens {(n_reused - n_restored) / n_prompt:.0%} came from RAM, "
            f"{n_restored / n_prompt:.0%} from disk"
        )
    written = f"Written in the last hour: {show_bytes(store['written_last_hour_bytes'])}"
    turn = store.get("written_turn_bytes")
    yield written + (f"; {show_bytes(turn)} a turn since the server's start" if turn else "")
    for name, tier in store.get("tiers", {}).items():
        if n_tokens := tier["asked_again_tokens"]:
            yield f"Evicted from {name} and asked for again: {n_tokens:,} tokens"
    if memory:
        used = {name: n for name, n in memory.items() if n and name not in _NO_PARTS}
        areas = ", ".join(f"{name} {show_bytes(n)}" for name, n in used.items())
        yield f"Memory: {show_bytes(sum(used.values()))} of {show_bytes(memory['total'])}: {areas}"


def _explained(record: Record) -> Iterator[str]:
    yield f"{record['id']}, {local_time(record['received'])}: {shown(record['sentence'], 400)}"
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
