"""A reply that another conversation has already got takes fewer steps, also after a restart.

Wrong drafts change neither a reply nor its stored blocks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import StartServer, make_zoo_model, synthetic_text

from .stored import wait_for_commit

LAUNCHER = """
import os, sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

from mlx_lm_kvpersist.host.scheduling import prompt_lookup

prompt_lookup.time = SimpleNamespace(perf_counter=count().__next__)  # no step is slow
checked = prompt_lookup.checked


def counted(batch, ids):
    told = checked(batch, ids)
    with Path(os.environ["TOLD"]).open("a") as log:
        print(len(told), file=log)
    return told


prompt_lookup.checked = counted
from mlx_lm_kvpersist._startup import serve

serve(sys.argv[1:])
"""


def test_stored_reply_of_another_session_becomes_draft_tokens(
    tiny_model: Path, tmp_path: Path
) -> None:
    launcher, count_log = tmp_path / "counting.py", tmp_path / "told"
    launcher.write_text(LAUNCHER, encoding="utf-8")

    def n_accepted_drafts() -> int:
        counts = count_log.read_text().split() if count_log.exists() else []
        count_log.write_text("")
        return sum(map(int, counts)) - len(counts)

    start = StartServer(tmp_path)
    try:
        env = {"TOLD": str(count_log)}
        server = start.with_plugin(tiny_model, launcher=(str(launcher),), env=env)
        prompt = synthetic_text(60, seed=5)

        def reply(session: str, namespace: str = "ours") -> str:
            headers = {"X-KVPersist-Namespace": namespace}
            response = server.complete(
                prompt, session, max_tokens=150, temperature=0.0, headers=headers
            )
            wait_for_commit(
                start.store, session, response.prompt_tokens + response.completion_tokens
            )
            return response.text

        first, n_without_store = reply("a"), n_accepted_drafts()
        server.restart(kill=True)
        assert reply("b", "theirs") == first
        assert n_accepted_drafts() < n_without_store + 30
        assert reply("c") == first  # the stored ids are still being read
        n_accepted_drafts()
        assert reply("d") == first
        assert n_accepted_drafts() > n_without_store + 100
    finally:
        start.close()


WRONG = """
import random, sys

from mlx_lm_kvpersist.host.scheduling import prompt_lookup

rng = random.Random(3)
prompt_lookup.MOST_CREDIT = 1e9
lookup = prompt_lookup.PromptLookup
lookup._gain = property(lambda self: 1e9, lambda self, gain: None)
lookup._n_ids = property(lambda self: rng.randrange(1, 17), lambda self, n: None)
after = lookup._after


def wrong(self, last, n):
    found = after(self, last, rng.randrange(n + 1))
    return [*found, *(rng.randrange(300, 500) for _ in range(n - len(found)))]


lookup._after = wrong
from mlx_lm_kvpersist._startup import serve

serve(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "deepseek_v3", "llama"])
def test_wrong_drafts_change_neither_replies_nor_stored_tokens(
    family: str, start_server: StartServer, tmp_path: Path
) -> None:
    """Replies cross the end of a window of 64 tokens or of a block; a kill follows each turn."""
    model, launcher = make_zoo_model(tmp_path / "model", family), tmp_path / "wrong.py"
    config = json.loads((model / "config.json").read_text())
    if "sliding_window" in config:
        (model / "config.json").write_text(json.dumps({**config, "sliding_window": 64}))
    launcher.write_text(WRONG, encoding="utf-8")
    stores = [("--kvpersist-dir", str(tmp_path / name)) for name in ("wrong", "none")]
    servers = [
        start_server.with_plugin(model, *stores[0], launcher=(str(launcher),)),
        start_server.with_plugin(model, *stores[1], "--kvpersist-draft", "off"),
    ]
    text = synthetic_text(40 if "sliding_window" in config else 560, seed=11)
    for _ in range(3):
        params: dict[str, Any] = {"max_tokens": 50, "temperature": 0.0, "logprobs": True}
        both = [server.complete(text, "mine", **params) for server in servers]
        actual, expected = (entry.raw["choices"][0]["logprobs"]["content"] for entry in both)
        assert both[0].text == both[1].text
        logprobs = [entry["logprob"] for entry in expected]
        assert [entry["logprob"] for entry in actual] == pytest.approx(logprobs, abs=2e-2)
        for server, store, reply in zip(servers, stores, both, strict=True):
            n_tokens = reply.prompt_tokens + reply.completion_tokens
            wait_for_commit(Path(store[1]), "mine", n_tokens)
            server.restart(kill=True)
        text += both[0].text + synthetic_text(12, seed=12)
