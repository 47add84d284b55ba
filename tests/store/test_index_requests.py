"""The last requests in the index: few, small, and no reason to call an index damaged."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from mlx_lm_kvpersist.store.index import KEPT, Index


def record(number: int, **more: object) -> dict[str, object]:
    return {"id": f"kvp-{number}", "sentence": f"number {number}", **more}


def test_c11_the_last_requests_are_kept_and_no_more(tmp_path: Path) -> None:
    index = Index(tmp_path / "index.sqlite")
    assert index.requests() == []
    for number in range(KEPT + 20):
        index.add_request(record(number))
    assert index.requests() == [record(number) for number in reversed(range(20, KEPT + 20))]
    index.add_request(record(1000, session="x" * 5000))
    assert index.requests()[0] == record(KEPT + 19), "an overlong record is left out"
    index.close()
    again = Index(tmp_path / "index.sqlite")
    assert len(again.requests()) == KEPT
    again.forget_requests()
    assert again.requests() == []
    again.close()


def test_records_go_with_their_session_and_others_quote_it_no_more(tmp_path: Path) -> None:
    index = Index(tmp_path / "index.sqlite")
    quotes = {"char": 5, "stored": "a secret of gone", "asked": "another"}
    index.add_request(record(1, session="gone", divergence=None))
    index.add_request(record(2, session="stays", divergence=quotes))
    index.add_request(record(3, session=None, divergence=None))
    index.add_request(record(4))  # by an older version
    index.forget_requests(["gone"])
    silent = {"char": 5, "stored": None, "asked": None}
    left = [record(3, session=None, divergence=None)]
    assert index.requests() == [*left, record(2, session="stays", divergence=silent)]
    index.close()
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"secret" not in kept and b"stays" in kept
    index = Index(tmp_path / "index.sqlite")
    index.forget_requests([None, "stays"])
    assert index.requests() == []
    index.close()


def test_c11_damaged_records_are_left_out(tmp_path: Path) -> None:
    index = Index(tmp_path / "index.sqlite")
    index.add_request(record(1))
    db = sqlite3.connect(tmp_path / "index.sqlite")
    with db:
        for about in ("{", "[]", "{}", b"\xff\xfe", 7):
            db.execute("INSERT INTO requests (about) VALUES (?)", (about,))
    db.close()
    assert index.requests() == [record(1)]
    index.close()
