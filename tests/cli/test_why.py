"""why, from a store: which request an id names, and records that are written late."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import pytest

from mlx_lm_kvpersist.cli import why
from mlx_lm_kvpersist.store.index import Index

from .conftest import CommandLine

IDS = ("kvp-00112233445566aa", "kvp-00112233445577bb", "kvp-ffeeddccbbaa66aa")


def add(run: CommandLine, request_id: str) -> None:
    names = ("sentence", "model", "outcome")
    record: dict[str, Any] = {**dict.fromkeys(names, "STOCK"), "id": request_id}
    record |= {"received": 0.0, "divergence": None}
    with closing(Index(run.folder / "index.sqlite")) as index:
        index.state.add_request(record)


def test_a_store_without_requests_has_one_line(run: CommandLine) -> None:
    assert run("why") == 0
    (line,) = run.out.splitlines()
    assert line.startswith(f"no request yet in {run.folder}; for a server with another folder")


def test_either_side_of_an_id_is_enough(run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(why, "WRITTEN_S", 0.0)
    for request_id in IDS:
        add(run, request_id)
    for part in (IDS[1], IDS[1][:17], "bb"):
        assert run.json("why", part)["id"] == IDS[1]
    for part, n_ids in (("66aa", 2), ("kvp-0011", 2), ("kvp-", 3)):
        assert f"{n_ids} ids begin or end with {part}; " in run.error("why", part)
    for part in ("2233", ""):
        assert "no id begins or ends with it" in run.error("why", part)


def test_a_record_that_is_written_late_is_waited_for(
    run: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: add(run, IDS[0]))
    assert run("why", IDS[0]) == 0 and IDS[0] in run.out


def test_times_in_json_are_those_of_every_command(run: CommandLine) -> None:
    add(run, IDS[0])
    (listed,) = run.json("why")
    assert run.json("why", IDS[0]) == listed
    assert listed["received"] == "1970-01-01T00:00:00+00:00"
