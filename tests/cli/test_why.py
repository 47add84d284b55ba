"""The `why` command on a store: ids of requests, and records that are written late."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import pytest

from mlx_lm_kvpersist.cli import why
from mlx_lm_kvpersist.store.index import Index

from .conftest import CommandLine

IDS = ("kvp-00112233445566aa", "kvp-00112233445577bb", "kvp-ffeeddccbbaa66aa")


def add_request(run: CommandLine, request_id: str) -> None:
    names = ("sentence", "model", "outcome")
    record: dict[str, Any] = {**dict.fromkeys(names, "STOCK"), "id": request_id}
    record |= {"received": 0.0, "divergence": None}
    with closing(Index(run.folder / "index.sqlite")) as index:
        index.state.add_request(record)


def test_without_requests_why_prints_one_line(run: CommandLine) -> None:
    assert run("why") == 0
    (line,) = run.out.splitlines()
    assert line.startswith(f"no request yet in {run.folder}; for a server with another folder")


def test_a_request_is_found_by_either_end_of_its_id(
    run: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(why, "WRITTEN_S", 0.0)
    for request_id in IDS:
        add_request(run, request_id)
    for id_part in (IDS[1], IDS[1][:17], "bb"):
        assert run.json("why", id_part)["id"] == IDS[1]
    for id_part, n_ids in (("66aa", 2), ("kvp-0011", 2), ("kvp-", 3)):
        assert f"{n_ids} ids begin or end with {id_part}; " in run.error("why", id_part)
    for id_part in ("2233", ""):
        assert "no id begins or ends with it" in run.error("why", id_part)


def test_why_waits_for_a_record_that_is_written_late(
    run: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: add_request(run, IDS[0]))
    assert run("why", IDS[0]) == 0 and IDS[0] in run.out


def test_list_and_record_have_the_same_json_with_iso_times(run: CommandLine) -> None:
    add_request(run, IDS[0])
    (listed,) = run.json("why")
    assert run.json("why", IDS[0]) == listed
    assert listed["received"] == "1970-01-01T00:00:00+00:00"
