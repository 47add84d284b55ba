"""A reply that another conversation has had takes fewer steps, after a restart, too."""

from __future__ import annotations

from pathlib import Path

from tests.support import StartServer, synthetic_text

from .stored import wait_for_commit

LAUNCHER = """
import os, sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

from mlx_lm_kvpersist.host.scheduling import guesses

guesses.time = SimpleNamespace(perf_counter=count().__next__)  # no step is slow
checked = guesses._checked


def counted(batch, ids):
    told = checked(batch, ids)
    with Path(os.environ["TOLD"]).open("a") as log:
        print(len(told), file=log)
    return told


guesses._checked = counted
from mlx_lm_kvpersist._startup import serve

serve(sys.argv[1:])
"""


def test_what_another_session_was_told_is_guessed(tiny_model: Path, tmp_path: Path) -> None:
    launcher, told = tmp_path / "counting.py", tmp_path / "told"
    launcher.write_text(LAUNCHER, encoding="utf-8")

    def n_guessed() -> int:
        counts = told.read_text().split() if told.exists() else []
        told.write_text("")
        return sum(map(int, counts)) - len(counts)

    start = StartServer(tmp_path)
    try:
        env = {"TOLD": str(told)}
        server = start.with_plugin(tiny_model, launcher=(str(launcher),), env=env)
        prompt = synthetic_text(60, seed=5)

        def reply(session: str, namespace: str = "ours") -> str:
            headers = {"X-KVPersist-Namespace": namespace}
            got = server.complete(prompt, session, max_tokens=150, temperature=0.0, headers=headers)
            wait_for_commit(start.store, session, got.prompt_tokens + got.completion_tokens)
            return got.text

        first, by_itself = reply("a"), n_guessed()
        server.restart(kill=True)
        assert reply("b", "theirs") == first
        assert n_guessed() < by_itself + 30
        assert reply("c") == first  # while what is stored is read
        n_guessed()
        assert reply("d") == first
        assert n_guessed() > by_itself + 100
    finally:
        start.close()
