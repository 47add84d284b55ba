"""Messages between the ranks of one model: real processes over MLX's ring."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_lm_kvpersist import ranks as ranks_module
from mlx_lm_kvpersist.ranks import Ranks, alone, ranks
from tests.support.server_process import HOST, free_port

SECONDS = 60
BEGIN = """
from mlx_lm_kvpersist.ranks import *
import mlx.core as mx, sys
group = mx.distributed.init()
us = Ranks(group.size(), group.rank())
"""


def run_ranks(tmp_path: Path, *scripts: str) -> list[tuple[int, str, str]]:
    """Run a script for each rank; return their exit statuses, stdout and stderr.

    The stdin of a rank ends when all ranks before it have ended.
    """
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"{HOST}:{free_port()}"] for _ in scripts]), encoding="utf-8")
    running = [
        subprocess.Popen(
            [sys.executable, "-c", BEGIN + textwrap.dedent(script)],
            env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, script in enumerate(scripts)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(running, outputs, strict=True)]


def test_ranks_exchange_values_and_rank_0_decides(tmp_path: Path) -> None:
    script = """
        long = {"text": "x" * 5000, "ids": list(range(2000))}
        print(us.all_of(10 + us.rank, "a"), us.least(-3 * us.rank, "b"))
        print(us.agree(True, "c"), us.agree(us.rank == 0, "d"), us.all_of(1 << 40, "e"))
        print(us.told(us.rank, "f"), us.first(lambda: long, "g") == long, us.decides)
        calls = []
        us.first(lambda: calls.append(1), "h")
        print(len(calls), us.n_messages)
    """
    results = run_ranks(tmp_path, script, script)
    common = "[10, 11] -3\nTrue False [1099511627776, 1099511627776]\n"
    assert [(code, stdout) for code, stdout, _ in results] == [
        (0, f"{common}0 True True\n1 8\n"),
        (0, f"{common}0 True False\n0 8\n"),
    ], results


def test_an_error_on_rank_0_is_raised_on_all_ranks(tmp_path: Path) -> None:
    script = """
        from mlx_lm_kvpersist.errors import RequestRefused
        class Own(Exception):
            def __init__(self, first, second): super().__init__(f"{first} {second}")
        def refuse(): raise RequestRefused("no", 503)
        def fail(): raise Own(1, 2)
        for decide in (refuse, fail):
            try: us.first(decide, "a")
            except Exception as error: print(type(error).__name__, error, vars(error))
    """
    expected = "RequestRefused no {'status': 503, 'code': None}\nRuntimeError Own: 1 2 {}\n"
    assert [result[:2] for result in run_ranks(tmp_path, script, script)] == [(0, expected)] * 2


@pytest.mark.parametrize(
    "others", ["us.told(1, 'another')", "us.all_of(1, 'one'); us.told(1, 'one')", "sys.exit(3)"]
)
def test_all_ranks_end_if_messages_differ_or_one_rank_exits(tmp_path: Path, others: str) -> None:
    first = """
        us.watch()
        us.told(1, "one")
        us.told(2, "two")
        print("went on")
    """
    others = f"us.watch(); {others}"  # as in a server, else MLX may wait forever
    (code, stdout, errors), (other_code, *_) = run_ranks(tmp_path, first, others)
    assert code != 0 and other_code != 0 and "went on" not in stdout
    # MLX may notice the lost connection first.
    assert re.search("rank|connection to a peer was lost", errors.splitlines()[-1])


def test_ranks_with_different_notes_end_at_the_next_message(tmp_path: Path) -> None:
    script = """
        us.watch()
        us.note(7)
        us.told(1, "alike")
        print(us.n_messages, flush=True)
        us.note(us.rank)
        us.told(1, "unlike")
        print("went on")
    """
    for code, stdout, _ in run_ranks(tmp_path, script, script):
        assert code != 0 and stdout == "2\n"


def test_a_rank_that_waits_too_long_for_a_message_ends(tmp_path: Path) -> None:
    waiting = """
        us.patience_s = 0.1
        us.watch()
        us.told(1, "one")
    """
    silent = "sys.stdin.read()"
    (code, _, errors), _ = run_ranks(tmp_path, waiting, silent)
    assert code == 1 and "got no message from other ranks for 0.1 s" in errors


def test_a_single_process_sends_no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "_array", None)  # every send fails
    single = Ranks(1, 0)
    error = ValueError("as it was raised")

    def fail() -> None:
        raise error

    assert (
        single.first(lambda: 7, "a") == 7
        and single.all_of(3, "b") == [3]
        and single.told(5, "c") == 5
    )
    assert single.agree(True, "d") and not single.agree(False, "e")
    with pytest.raises(ValueError, match="as it was raised") as raised:
        single.first(fail, "f")
    assert raised.value is error and single.n_messages == 0


def test_the_context_manager_alone_hides_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    several = Ranks(2, 1)
    monkeypatch.setattr(ranks_module, "_current", several)
    with alone():
        assert not ranks().are_several and ranks().decides
        assert (mx.distributed.init().size(), mx.distributed.init().rank()) == (1, 0)
    assert ranks() is several
