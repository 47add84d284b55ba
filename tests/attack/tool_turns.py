"""A conversation with a hybrid model whose states are postponed; it runs until it is killed.

python -m tests.attack.tool_turns STORE LOG

The program continues at the log's end. The log gets a line of JSON for each turn: the reused
tokens, all tokens, and the reply. Each turn takes its nominal time, and begins after the writer has
written the earlier turns, so a busy machine does not increase the loss of a kill.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from mlx_lm_kvpersist.cache.geometry.kinds import end_on_grid
from mlx_lm_kvpersist.cache.geometry.spec import probe_model
from mlx_lm_kvpersist.store.block_store import StoreLimits
from models_check.build import build
from models_check.conversation import random_ids
from models_check.stored import StoredModel
from tests.support.waiting import settle

TOKENS_PER_S = 100.0
MAX_LOSS_S = 1.0
SYSTEM = random_ids(1, 40)
N_TOOL, N_REPLY = 21, 6
TURN_S = (N_TOOL + N_REPLY) / TOKENS_PER_S


def model(folder: Path, max_loss_s: float = MAX_LOSS_S) -> StoredModel:
    """Return a tiny model whose recorded speed is `TOKENS_PER_S`."""
    made = build("qwen3_next")
    end_on_grid(made)
    limits = StoreLimits(1 << 30, 1 << 30, max_loss_s=max_loss_s)
    stored = StoredModel(made, probe_model(made), folder, limits)
    for n_tokens in (512, 1024, 512, 1024):
        stored.loaded.speed.pace.learn(1, n_tokens, n_tokens / TOKENS_PER_S)
    return stored


def lines(log: Path) -> list[dict[str, Any]]:
    """Return the turns in a log; the last line may be torn."""
    whole = log.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def turn(stored: StoredModel, before: list[dict[str, Any]]) -> dict[str, Any]:
    """Run the next turn."""
    history: list[int] = []
    for number, earlier in enumerate(before):
        history += [*random_ids(100 + number, N_TOOL), *earlier["reply"]]
    n_known = len(SYSTEM) + len(history)
    prompt = [SYSTEM, [*history, *random_ids(100 + len(before), N_TOOL)]]
    reply = stored.answer(prompt, N_REPLY)
    n_reused = stored.outcomes[-1].n_reused
    return {"reused": n_reused, "of": n_known if before else 0, "reply": reply.ids}


def main(folder: Path, log: Path) -> None:
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    before = lines(log)
    if (text := log.read_text()) and not text.endswith("\n"):
        os.ftruncate(descriptor, len(text.rpartition("\n")[0]) + 1 if before else 0)
    stored = model(folder)
    while True:
        time.sleep(TURN_S)
        settle(stored.store.writer)
        before.append(turn(stored, before))
        os.write(descriptor, (json.dumps(before[-1]) + "\n").encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
