"""Requests are served on a full, read-only or deleted disk, and after files have changed."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_lm_kvpersist.errors import StoreError
from mlx_lm_kvpersist.request.model import LoadedModel
from mlx_lm_kvpersist.store.block_store import BlockStore
from tests.server.stored import n_tokens, wait_for_commit
from tests.support import Message, StartServer, synthetic_text, wait_until, writer_held

from .disks import Disk, Limited, small_disk
from .driving import LIMITS, Cold, Talk, conversation_ids, replace_payload, talk_with
from .quarantine import quarantined_reasons


@pytest.fixture(params=["tmpfs", "limited"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    with small_disk(request.param, tmp_path / "disk") as disk:
        yield disk


@pytest.fixture
def disk_talk(disk: Disk, loaded: LoadedModel) -> Iterator[Talk]:
    with talk_with(loaded, disk.folder / "store") as talk:
        yield talk


def ask_in_ram(talk: Talk, cold: Cold, ids: list[int], label: str) -> None:
    answer = talk.ask([*ids, 5])
    assert (answer.outcome.tier, answer.outcome.n_reused) == ("ram", len(ids)), label
    cold.check(answer, label)


def check_on_disk(talk: Talk, cold: Cold, ids: list[int]) -> None:
    talk.forget_hot_blocks()
    answer = talk.ask([*ids, 5])
    assert (answer.outcome.tier, answer.outcome.n_restored) == ("disk", len(ids))
    cold.check(answer)


def errors(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.ERROR and text in record.getMessage()
    ]


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if "tmp" in path.name]


def test_on_a_full_disk_turns_are_served_from_ram(
    disk: Disk, disk_talk: Talk, cold: Cold, caplog: pytest.LogCaptureFixture
) -> None:
    """The failure is logged once, no turn is partly written, and later turns are stored."""
    talk = disk_talk
    before, during, later = (conversation_ids(talk.loaded, 300, seed=n) for n in range(3))
    talk.remember(before, "before")
    talk.store.drain()
    with disk.full():
        for n in range(3):
            talk.remember(during[: 260 + 20 * n], "during")
            talk.store.drain()
            ask_in_ram(talk, cold, during[: 260 + 20 * n], f"full, turn {n}")
        assert leftovers(talk.folder) == []
        check_on_disk(talk, cold, before)
    assert len(errors(caplog, "cannot save a turn")) == 1
    assert talk.store.turns_saved == 1
    talk.remember(later, "later")
    check_on_disk(talk, cold, later)
    talk.store.close()
    with talk_with(talk.loaded, talk.folder) as again:
        again.store.drain()
        assert {s.name for s in again.store.index.sessions()} == {"before", "later"}
        assert len(list((talk.folder / "blocks").rglob("*.safetensors"))) == 4
        check_on_disk(again, cold, before)


def test_damaged_block_on_a_full_disk_is_not_used(disk: Disk, disk_talk: Talk, cold: Cold) -> None:
    """The block cannot be moved to quarantine."""
    talk = disk_talk
    ids = conversation_ids(talk.loaded, 600, seed=1)
    talk.remember(ids)
    damage(talk.blocks(ids)[1])
    talk.forget_hot_blocks()
    with disk.full():
        for _ in range(2):
            answer = talk.ask([*ids, 5])
            assert answer.outcome.n_reused == 256
            cold.check(answer)
            talk.store.drain()
    talk.go_on(answer, 3)
    check_on_disk(talk, cold, ids)


def test_on_a_read_only_disk_turns_are_served_from_ram(
    disk: Disk, disk_talk: Talk, cold: Cold, caplog: pytest.LogCaptureFixture
) -> None:
    talk = disk_talk
    before, during, later = (conversation_ids(talk.loaded, 300, seed=n) for n in range(3))
    talk.remember(before, "before")
    talk.store.drain()
    with disk.read_only():
        for n in range(2):
            talk.remember(during[: 260 + 20 * n], "during")
            talk.store.drain()
            ask_in_ram(talk, cold, during[: 260 + 20 * n], f"read-only, turn {n}")
        check_on_disk(talk, cold, before)
    (message,) = errors(caplog, "cannot save a turn")
    assert "Read-only file system" in message
    assert message.endswith(
        "; mount the volume for writing, or choose another folder with --kvpersist-dir"
    )
    talk.remember(later, "later")
    check_on_disk(talk, cold, later)


def test_damaged_block_on_a_read_only_disk_is_not_used(
    disk: Disk, disk_talk: Talk, cold: Cold
) -> None:
    talk = disk_talk
    ids = conversation_ids(talk.loaded, 600, seed=1)
    talk.remember(ids)
    damage(talk.blocks(ids)[0])
    talk.forget_hot_blocks()
    with disk.read_only():
        for _ in range(2):
            answer = talk.ask([*ids, 5])
            assert answer.outcome.n_reused == 0
            cold.check(answer)
            talk.store.drain()


def test_read_only_disk_at_startup_raises_a_store_error(disk: Disk, disk_talk: Talk) -> None:
    """The error says what to do."""
    disk_talk.store.close()
    message = "Read-only file system.*--kvpersist-dir"
    with disk.read_only(), pytest.raises(StoreError, match=message):
        BlockStore(disk_talk.folder, LIMITS)


def test_failed_file_call_loses_only_one_turn(
    talk: Talk, cold: Cold, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For every n, the n-th call that opens, replaces or removes a file fails."""
    stock = {name: getattr(os, name) for name in ("open", "replace", "unlink")}
    calls_left = [-1]

    def failing(name: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if str(talk.folder) in str(args[0]):
                calls_left[0] -= 1
                if calls_left[0] == -1:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            result: object = stock[name](*args, **kwargs)
            return result

        return call

    talk.store.drain()
    for name in stock:
        monkeypatch.setattr(os, name, failing(name))
    n_failed = 0
    for n in range(40):
        calls_left[0] = n
        ids = conversation_ids(talk.loaded, 300 + n, seed=n)
        talk.remember(ids, f"session-{n}")
        talk.store.drain()
        failed = calls_left[0] < 0
        n_failed += failed
        calls_left[0] = -1
        ask_in_ram(talk, cold, ids, f"call {n} failed")
        # A repeated turn is stored in full.
        talk.store.pool.clear()
        talk.remember(ids, f"session-{n}")
        check_on_disk(talk, cold, ids)
        if not failed:
            break
    assert 3 <= n_failed < 40
    assert leftovers(talk.folder) == []


# Changed files.


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def cut_the_header(path: Path) -> None:
    os.truncate(path, 100)


def make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_a_dead_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


CHANGES = [damage, truncate, empty, zero, cut_the_header]


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_block_is_quarantined_and_recomputed(
    talk: Talk,
    cold: Cold,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Path], None],
    number: int,
) -> None:
    ids = conversation_ids(talk.loaded, 600, seed=1)
    talk.remember(ids, "s")
    path = talk.blocks(ids)[number]
    talk.forget_hot_blocks()
    change(path)
    answer = talk.ask([*ids, 5])
    cold.check(answer)
    assert answer.outcome.n_reused == 256 * number
    (reason,) = quarantined_reasons(talk)
    assert path.name in reason or path.stem in reason
    assert f"block {path.stem} goes to quarantine: {reason}" in caplog.text
    talk.go_on(answer, 3, "s")
    check_on_disk(talk, cold, ids)


def test_missing_block_is_recomputed(
    talk: Talk, cold: Cold, caplog: pytest.LogCaptureFixture
) -> None:
    ids = conversation_ids(talk.loaded, 600, seed=1)
    talk.remember(ids, "s")
    path = talk.blocks(ids)[1]
    talk.forget_hot_blocks()
    path.unlink()
    answer = talk.ask([*ids, 5])
    cold.check(answer)
    assert answer.outcome.n_reused == 256
    assert f"block {path.stem} is no longer on disk" in caplog.text
    assert quarantined_reasons(talk) == []
    talk.go_on(answer, 3, "s")
    check_on_disk(talk, cold, ids)


def test_all_missing_blocks_are_saved_with_the_next_turn(talk: Talk, cold: Cold) -> None:
    """The index still has the blocks after the first missing block."""
    ids = conversation_ids(talk.loaded, 2100, seed=1)
    talk.remember(ids, "s")
    paths = talk.blocks(ids)[1:]
    talk.forget_hot_blocks()
    for path in paths:
        path.unlink()
    ids = talk.go_on(talk.ask([*ids, 5]), 3, "s")
    talk.store.drain()
    assert talk.store.turns_not_saved == 0
    check_on_disk(talk, cold, ids)


def test_blocks_on_disk_that_are_computed_again_do_not_wait_for_the_writer(talk: Talk) -> None:
    """Otherwise they could push another conversation's turn out of the writer's queue."""
    ids = conversation_ids(talk.loaded, 2048, seed=1)
    talk.remember(ids, "s")
    talk.forget_hot_blocks()
    with writer_held(talk.store):
        talk.remember(ids, "s")
        assert talk.store.writer.n_bytes == talk.store.pool.held_bytes == 0


@pytest.mark.parametrize("replace_file", [make_a_folder, make_a_dead_link])
def test_foreign_file_in_a_blocks_place_is_kept(
    talk: Talk,
    cold: Cold,
    caplog: pytest.LogCaptureFixture,
    replace_file: Callable[[Path], None],
) -> None:
    """The block is written after the foreign file is removed."""
    ids = conversation_ids(talk.loaded, 600, seed=1)
    talk.remember(ids, "s")
    path = talk.blocks(ids)[1]
    talk.forget_hot_blocks()
    replace_file(path)
    inode = path.lstat().st_ino
    answer = talk.ask([*ids, 5])
    cold.check(answer)
    assert answer.outcome.n_reused == 256
    assert "is not a regular file" in caplog.text and quarantined_reasons(talk) == []
    after = talk.go_on(answer, 3, "s")
    talk.store.drain()
    assert "is not the store's file; move it away" in caplog.text
    assert path.lstat().st_ino == inode
    path.rmdir() if path.is_dir() else path.unlink()
    talk.go_on(talk.ask([*after, 5]), 3, "s")
    check_on_disk(talk, cold, ids)


def test_swapped_block_files_are_quarantined(talk: Talk, cold: Cold) -> None:
    """The files are intact, but have each other's names."""
    first, second = (conversation_ids(talk.loaded, 600, seed=n) for n in (1, 2))
    talk.remember(first)
    talk.remember(second)
    first_path, second_path = talk.blocks(first)[1], talk.blocks(second)[1]
    talk.forget_hot_blocks()
    content = first_path.read_bytes()
    first_path.write_bytes(second_path.read_bytes())
    second_path.write_bytes(content)
    for ids in (first, second):
        answer = talk.ask([*ids, 5])
        cold.check(answer)
        assert answer.outcome.n_reused == 256
    reasons = quarantined_reasons(talk)
    assert len(reasons) == 2 and all("holds block" in reason for reason in reasons)


def test_block_files_of_another_model_are_not_used(
    talk: Talk, other_weights: LoadedModel, cold: Cold, tmp_path: Path
) -> None:
    """Under our block's name such a file fails the key check; under its own name it is not read."""
    ids = conversation_ids(talk.loaded, 600, seed=1)
    stranger = replace(other_weights, fingerprint="stranger")
    with talk_with(stranger, tmp_path / "other") as other:
        other.remember(ids)
        foreign = other.blocks(ids)
    talk.remember(ids, "s")
    own = talk.blocks(ids)
    for path, theirs in zip(own, foreign, strict=True):
        place = talk.folder / theirs.relative_to(tmp_path / "other")
        place.parent.mkdir(exist_ok=True)
        shutil.copy(theirs, place)
        if path != own[0]:
            shutil.copy(theirs, path)
    talk.store.close()
    with talk_with(talk.loaded, talk.folder) as again:
        answer = again.ask([*ids, 5])
        cold.check(answer)
        assert answer.outcome.n_reused == 256
        # Several files are read at a time, so more than one bad file may be detected.
        reasons = quarantined_reasons(again)
        assert reasons and all("holds block" in reason for reason in reasons)
        # The store removes files that were not committed.
        present = set((talk.folder / "blocks").rglob("*.safetensors"))
        assert not present & {talk.folder / p.relative_to(tmp_path / "other") for p in foreign}


def test_block_with_arrays_of_a_wrong_length_is_quarantined(
    talk: Talk, cold: Cold, tmp_path: Path
) -> None:
    ids = conversation_ids(talk.loaded, 600, seed=1)
    talk.remember(ids, "s")
    last, first = talk.blocks(ids)[2], talk.blocks(ids)[0]
    talk.forget_hot_blocks()
    replace_payload(last, first)  # 256 tokens instead of 88
    answer = talk.ask([*ids, 5])
    cold.check(answer)
    assert answer.outcome.n_reused == 512
    (reason,) = quarantined_reasons(talk)
    assert reason.startswith("does not fit the model")


# Real servers.


def chat(n: int, seed: int = 1) -> list[Message]:
    return [{"role": "user", "content": f"{n}. {synthetic_text(120, seed=seed)}"}]


def test_server_survives_deletion_of_its_folder(
    start_server: StartServer, tiny_model: Path
) -> None:
    """Requests are served, and later turns survive kill -9."""
    server = start_server.with_plugin(tiny_model)
    store = start_server.store
    first = server.chat(chat(0), "s", temperature=0.0)
    wait_for_commit(store, "s", first.prompt_tokens + first.completion_tokens)
    # Rename first: rmtree fails if the server makes a file in the folder at the same time.
    shutil.rmtree(store.rename(store.with_name("deleted")))
    # The deleted index had the first reply's ids, so the client sends back another reply.
    talk = [*chat(0), {"role": "assistant", "content": "Indeed."}, *chat(1)]
    second = server.chat(talk, "s", temperature=0.0)
    assert second.cached_tokens > 0
    talk += [{"role": "assistant", "content": second.text}, *chat(2)]
    third = server.chat(talk, "s", temperature=0.0)
    wait_for_commit(store, "s", third.prompt_tokens + third.completion_tokens)
    assert "Traceback" not in server.log
    server.restart(kill=True)
    again = server.chat(talk, "s", temperature=0.0)
    assert again.text == third.text
    assert (again.kvpersist["outcome"], again.kvpersist["tier"]) == ("EXACT", "disk")


def test_server_on_a_full_disk_serves_from_ram(
    start_server: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    with small_disk("tmpfs", tmp_path / "disk") as disk:
        if isinstance(disk, Limited):
            pytest.skip("no tmpfs can be mounted, and a limit would not apply to the server")
        store = disk.folder / "store"
        options = ("--kvpersist-dir", str(store), "--kvpersist-min-free", "0")
        plugin = (
            "--plugin",
            "kvpersist",
            *options,
            "--kvpersist-disk",
            "8400K",
        )
        server = start_server(tiny_model, *plugin)
        replies = {"before": server.chat(chat(0), "before", temperature=0.0)}
        total = replies["before"].prompt_tokens + replies["before"].completion_tokens
        wait_for_commit(store, "before", total)
        with disk.full():
            for n in (1, 2):
                replies[f"full-{n}"] = server.chat(chat(n), f"full-{n}", temperature=0.0)
            wait_until(lambda: "cannot save a turn" in server.log, "a line in the log")
            again = server.chat(chat(1), temperature=0.0)
            assert (again.text, again.kvpersist["tier"]) == (replies["full-1"].text, "ram")
        assert server.log.count("cannot save a turn") == 1
        assert n_tokens(store, "full-1") == n_tokens(store, "full-2") == 0
        last = server.chat(chat(3), "after", temperature=0.0)
        wait_for_commit(store, "after", last.prompt_tokens + last.completion_tokens)
        assert "Traceback" not in server.log
        server.restart(kill=True)
        for n, name in ((0, "before"), (3, "after")):
            reply = server.chat(chat(n), temperature=0.0)
            assert reply.kvpersist["tier"] == "disk", name
        assert server.chat(chat(1), temperature=0.0).text == replies["full-1"].text
        server.stop()
