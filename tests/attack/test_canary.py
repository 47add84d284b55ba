"""The canary detects intact KV of another model, and does not change stored blocks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mlx_lm_kvpersist.request.model import LoadedModel
from mlx_lm_kvpersist.request.outcome import Kind
from tests.server.stored import block_files, wait_for_commit
from tests.support import Message, ServerProcess, synthetic_text
from tests.support.store_files import read_record

from .driving import TOLERANCE, Cold, Talk, conversation_ids, replace_payload, talk_with
from .quarantine import quarantined_reasons

N_TOKENS = 600


def store_of_another_model(other: LoadedModel, folder: Path, ids: list[int]) -> None:
    with talk_with(other, folder) as talk:
        talk.remember(ids, "s")


def test_canary_rejects_kv_of_other_weights(
    loaded: LoadedModel, other_weights: LoadedModel, cold: Cold, tmp_path: Path
) -> None:
    ids = conversation_ids(loaded, N_TOKENS, seed=1)
    store_of_another_model(other_weights, tmp_path, ids)
    with talk_with(loaded, tmp_path) as talk:
        answer = talk.ask([*ids, 5])
        cold.check(answer)
        assert (answer.outcome.kind, answer.outcome.n_reused) == (Kind.MISS, 0)
        reasons = quarantined_reasons(talk)
        assert len(reasons) == 3 and all("canary" in reason for reason in reasons)
        # The recomputed blocks are stored and reused.
        talk.go_on(answer, 8)
        talk.forget_hot_blocks()
        again = talk.ask([*ids, 5, 6])
        assert again.outcome.tier == "disk" and again.outcome.n_reused == N_TOKENS + 1
        cold.check(again)
        assert len(quarantined_reasons(talk)) == 3


def test_without_the_canary_kv_of_other_weights_is_used(
    loaded: LoadedModel, other_weights: LoadedModel, cold: Cold, tmp_path: Path
) -> None:
    """Checksums alone do not detect this KV, so the test above can fail."""
    ids = conversation_ids(loaded, N_TOKENS, seed=1)
    store_of_another_model(other_weights, tmp_path, ids)
    with talk_with(loaded, tmp_path) as talk:
        answer = talk.ask([*ids, 5], canary=False)
        assert answer.outcome.n_restored == N_TOKENS
        assert cold.difference(answer) > 100 * TOLERANCE


@pytest.mark.parametrize("n_blocks", [1, 2, 3])
def test_canary_rejects_last_blocks_of_other_weights(
    loaded: LoadedModel, other_weights: LoadedModel, cold: Cold, tmp_path: Path, n_blocks: int
) -> None:
    """The last blocks, 88 to 600 tokens, were computed by another model."""
    ids = conversation_ids(loaded, N_TOKENS, seed=2)
    with talk_with(other_weights, tmp_path / "other") as talk:
        talk.remember(ids)
        foreign = talk.blocks(ids)
    with talk_with(loaded, tmp_path / "store") as talk:
        talk.remember(ids)
        own = talk.blocks(ids)
        talk.forget_hot_blocks()
        for path, other in list(zip(own, foreign, strict=True))[-n_blocks:]:
            replace_payload(path, other)
        answer = talk.ask([*ids, 5])
        cold.check(answer)
        assert "canary" in " ".join(quarantined_reasons(talk))


def test_canary_does_not_change_stored_blocks(
    loaded: LoadedModel, cold: Cold, tmp_path: Path
) -> None:
    ids = conversation_ids(loaded, N_TOKENS, seed=3)
    with talk_with(loaded, tmp_path / "before") as talk:
        talk.remember(ids, "s")
    stored = {}
    for name in ("on", "off"):
        shutil.copytree(tmp_path / "before", tmp_path / name)
        for turn in range(3):
            with talk_with(loaded, tmp_path / name) as talk:
                prompt = ids if turn == 0 else [*ids[: 450 + turn], 7, 8, turn]
                answer = talk.ask([*prompt, 5], canary=name == "on")
                assert answer.outcome.tier == "disk"
                talk.go_on(answer, 150, "s")
        stored[name] = block_files(tmp_path / name)
    assert stored["on"] == stored["off"]
    assert len(stored["on"]) > len(block_files(tmp_path / "before"))


def test_server_recomputes_a_prompt_whose_canary_fails(
    tiny_model: Path, loaded: LoadedModel, tmp_path: Path
) -> None:
    messages: list[Message] = [{"role": "user", "content": synthetic_text(500, seed=1)}]
    plugin = ("--plugin", "kvpersist", "--kvpersist-dir")
    store = tmp_path / "store"
    with ServerProcess(tiny_model, *plugin, str(store), log_path=tmp_path / "0.log") as server:
        first = server.chat(messages, "s", temperature=0.0, max_tokens=12)
        second = server.chat([{"role": "user", "content": synthetic_text(500, seed=2)}], "t")
        for reply, session in ((first, "s"), (second, "t")):
            wait_for_commit(store, session, reply.prompt_tokens + reply.completion_tokens)
    _rotate_payloads(store)
    with ServerProcess(tiny_model, *plugin, str(store), log_path=tmp_path / "1.log") as server:
        reply = server.chat(messages, temperature=0.0, max_tokens=12)
        assert (reply.kvpersist["outcome"], reply.text) == ("MISS", first.text)
        assert "goes to quarantine: canary" in server.log


def _rotate_payloads(folder: Path) -> None:
    """Give each full block of the store the arrays of the next full block."""
    full = [path for path in (folder / "blocks").rglob("*.safetensors") if _n_tokens(path) == 256]
    assert len(full) >= 2
    copies = folder.parent / "copies"
    shutil.copytree(folder, copies)
    for path, other in zip(full, [*full[1:], full[0]], strict=True):
        replace_payload(path, copies / other.relative_to(folder))
    shutil.rmtree(copies)


def _n_tokens(path: Path) -> int:
    return read_record(path)[0].n_tokens


def test_canary_accepts_short_prefixes(talk: Talk, cold: Cold) -> None:
    """Some prefixes are shorter than the canary."""
    ids = conversation_ids(talk.loaded, 300, seed=4)
    talk.remember(ids)
    talk.forget_hot_blocks()
    for n_shared in (1, 2, 7, 8, 9):
        answer = talk.ask([*ids[:n_shared], *conversation_ids(talk.loaded, 20, seed=9)])
        cold.check(answer, f"{n_shared} tokens shared")
        talk.forget_hot_blocks()
    assert quarantined_reasons(talk) == []
