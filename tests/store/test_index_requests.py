"""Records of the last requests in the index: limits, deletion, and damaged records."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from mlx_lm_kvpersist.store.index import Index
from mlx_lm_kvpersist.store.small_state import KEPT


def record(number: int, **more: object) -> dict[str, object]:
    return {"id": f"kvp-{number}", "sentence": f"number {number}", **more}


def test_only_the_newest_request_records_are_kept(tmp_path: Path) -> None:
    index = Index(tmp_path / "index.sqlite")
    assert index.state.requests() == []
    for number in range(KEPT + 20):
        index.state.add_request(record(number))
    assert index.state.requests() == [record(number) for number in reversed(range(20, KEPT + 20))]
    index.state.add_request(record(1000, session="x" * 5000))
    assert index.state.requests()[0] == record(KEPT + 19), "an overlong record is left out"
    index.close()
    again = Index(tmp_path / "index.sqlite")
    assert len(again.state.requests()) == KEPT
    again.state.forget_requests()
    assert again.state.requests() == []
    again.close()


def test_deleting_a_session_deletes_its_records_and_all_quotes(tmp_path: Path) -> None:
    index = Index(tmp_path / "index.sqlite")
    quotes = {"char": 5, "stored": "a secret of gone", "asked": "another"}
    index.state.add_request(record(1, session="gone", divergence=None))
    index.state.add_request(record(2, session="stays", divergence=quotes))
    index.state.add_request(record(3, session=None, divergence=None))
    index.state.add_request(record(4))  # from an older version
    index.state.forget_requests([("gone", None)])
    without_quotes = {"char": 5, "stored": None, "asked": None}
    remaining = [record(3, session=None, divergence=None)]
    assert index.state.requests() == [
        *remaining,
        record(2, session="stays", divergence=without_quotes),
    ]
    index.close()
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"secret" not in content and b"stays" in content
    index = Index(tmp_path / "index.sqlite")
    index.state.forget_requests([(None, None), ("stays", None)])
    assert index.state.requests() == []
    index.close()


def test_damaged_records_are_left_out(tmp_path: Path) -> None:
    index = Index(tmp_path / "index.sqlite")
    index.state.add_request(record(1))
    db = sqlite3.connect(tmp_path / "index.sqlite")
    with db:
        for content in ("{", "[]", "{}", b"\xff\xfe", 7):
            db.execute("INSERT INTO requests (about) VALUES (?)", (content,))
    db.close()
    assert index.state.requests() == [record(1)]
    index.close()
