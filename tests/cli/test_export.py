"""sessions export and import: an import writes the same bytes into a store, or nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from contextlib import closing
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from safetensors import deserialize

from mlx_lm_kvpersist.block import Block, Checkpoint
from mlx_lm_kvpersist.errors import StoreError
from mlx_lm_kvpersist.store import folder as store_folder
from mlx_lm_kvpersist.store import session_file
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit
from mlx_lm_kvpersist.store.disk import DiskStore
from mlx_lm_kvpersist.store.files import checksum, metadata_of
from mlx_lm_kvpersist.store.records import Leaf
from tests.store.conftest import (
    ROOT,
    arrays_of,
    arrays_of_checkpoint,
    chain,
    save_turn,
    state,
    window,
)
from tests.support.store_files import block_path, checkpoint_path, write_block

from .conftest import (
    HEAD,
    LIMITS,
    WEIRD_NAME,
    CommandLine,
    block_files,
    checkpoint_files,
    damage,
    fill,
    flip,
)


@pytest.fixture
def exported(run: CommandLine, tmp_path: Path) -> Path:
    path = tmp_path / "last.safetensors"
    assert run("sessions", "export", "last", path) == 0 and str(path) in run.out
    return path


@pytest.fixture
def other_store(run: CommandLine, tmp_path: Path) -> CommandLine:
    """A command line for a store that does not exist yet."""
    return run.at(tmp_path / "other")


def test_an_export_contains_the_block_files_unchanged(run: CommandLine, exported: Path) -> None:
    content, files = exported.read_bytes(), block_files(run.folder)
    for node in chain(HEAD, [30], [31], [32]):
        assert files[f"{node.key.hex()}.safetensors"] in content
    assert json.loads(content.split(b"\n")[0])["session"] == {"name": "last", "n_tokens": 6}
    assert exported.stat().st_mode & 0o777 == 0o600


def forge(
    exported: Path,
    facts: Any = None,
    files: Callable[[list[bytes]], list[bytes]] = lambda files: files,
    n_blocks: int | None = None,
) -> None:
    """Rewrite an exported file with other contents and correct checksums."""
    with closing(session_file.SessionFile(exported)) as source:
        contents = files([source.own_file(n) for n in range(len(source.files))])
        n_blocks = len(source.blocks) if n_blocks is None else n_blocks
        facts = facts or {"name": source.name, "n_tokens": source.blocks[-1].stop}
    listed = [session_file.Listed.of(content) for content in contents]
    exported.write_bytes(session_file.header_of(facts, n_blocks, listed) + b"".join(contents))


def test_an_import_writes_the_same_block_files(
    run: CommandLine, exported: Path, other_store: CommandLine
) -> None:
    done = other_store.json("sessions", "import", exported)
    assert done["is_new"] and done["blocks_written"] == 4
    original = block_files(run.folder)
    names = {f"{node.key.hex()}.safetensors" for node in chain(HEAD, [30], [31], [32])}
    assert block_files(other_store.folder) == {name: original[name] for name in names}
    assert other_store.ids().keys() == {"last"}
    assert other_store.json("store", "verify")["ok"]
    # A server finds the session by its prompt, and reads its blocks.
    store = BlockStore(other_store.folder, LIMITS)
    head = store.children(ROOT.key)[0]
    assert head.ids == HEAD and store.reader.load(head, ROOT) is not None
    store.close()


def test_a_second_import_changes_nothing(exported: Path, other_store: CommandLine) -> None:
    first = other_store.json("sessions", "import", exported)
    again = other_store.json("sessions", "import", exported)
    assert (again["id"], again["is_new"], again["blocks_written"]) == (first["id"], False, 0)
    fill(other_store.folder, {"last": chain(HEAD, [30], [31], [32], [33])})
    assert other_store("sessions", "import", exported) == 0 and "was there" in other_store.out
    assert other_store.json("sessions", "show", "last")["blocks"] == 5


def test_an_import_continues_a_shorter_session(exported: Path, other_store: CommandLine) -> None:
    fill(other_store.folder, {"last": chain(HEAD, [30])})
    session_id = other_store.ids()["last"]
    done = other_store.json("sessions", "import", exported)
    assert (done["id"], done["blocks_written"], done["blocks"]) == (session_id, 2, 4)
    assert len(other_store.ids()) == 1


def test_a_session_evicted_during_its_import_is_added(
    exported: Path, other_store: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = chain(HEAD, [30], [31], [32], [33])
    fill(other_store.folder, {"last": nodes})
    with closing(DiskStore(other_store.folder, LIMITS)) as disk:
        block_path(other_store.folder, nodes[0].key).unlink()
        make_room = disk.make_room

        def evict(n_bytes: int, keep: Collection[bytes], *others: Any) -> bool:
            disk.forget(nodes[-1].key)
            return make_room(n_bytes, keep, *others)

        monkeypatch.setattr(disk, "make_room", evict)
        with closing(session_file.SessionFile(exported)) as source:
            session, written, is_new = session_file.import_session(disk, source)
        assert is_new and len(written) == 1
        assert disk.index.sessions() == [session] and session.leaf == nodes[-2].key


def test_an_import_into_the_same_store_writes_missing_blocks(
    run: CommandLine, exported: Path
) -> None:
    before, files = run.ids(), block_files(run.folder)
    assert run.json("sessions", "import", exported)["blocks_written"] == 0
    assert run("sessions", "rm", "last") == 0
    assert run.json("sessions", "import", exported)["blocks_written"] == 3
    assert block_files(run.folder) == files and run.ids().keys() == before.keys()


def test_an_import_replaces_a_missing_block_file(run: CommandLine, exported: Path) -> None:
    files = block_files(run.folder)
    next((run.folder / "blocks").glob(f"*/{chain(HEAD)[0].key.hex()}*")).unlink()
    assert run.json("sessions", "import", exported)["blocks_written"] == 1
    assert block_files(run.folder) == files and run.json("store", "verify")["ok"]


def test_weird_and_missing_names_are_imported(
    run: CommandLine, other_store: CommandLine, tmp_path: Path
) -> None:
    fill(run.folder, {WEIRD_NAME: chain([7])})
    for number, name in enumerate((WEIRD_NAME, None)):
        path = tmp_path / f"{number}.safetensors"
        assert run("sessions", "export", run.ids()[name], path) == 0
        assert other_store("sessions", "import", path) == 0
    assert other_store.ids().keys() == {WEIRD_NAME, None}


def evenly_spread(start: int, stop: int, n_positions: int = 60) -> list[int]:
    """Return positions from the first to the last, evenly spread."""
    last = stop - start - 1
    return sorted({start + last * n // (n_positions - 1) for n in range(n_positions)})


FEW_OR_MANY = pytest.mark.parametrize("n", [25, pytest.param(120, marks=pytest.mark.slow)])
"""The number of positions at which a file is damaged, one at a time."""


@FEW_OR_MANY
def test_an_import_refuses_a_flipped_bit_anywhere(
    exported: Path, other_store: CommandLine, n: int
) -> None:
    content = exported.read_bytes()
    header = content.index(b"\n") + 1
    bad = exported.with_name("bad.safetensors")
    for position in [*evenly_spread(0, header, n), *evenly_spread(header, len(content), n)]:
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        bad.write_bytes(changed)
        other_store.error("sessions", "import", bad)
        assert not other_store.folder.exists(), position


def test_an_import_refuses_a_truncated_or_longer_file(
    exported: Path, other_store: CommandLine
) -> None:
    content = exported.read_bytes()
    bad = exported.with_name("bad.safetensors")
    for n_bytes in [*range(10), *evenly_spread(10, len(content))]:
        bad.write_bytes(content[:n_bytes])
        assert "not a complete exported session" in other_store.error("sessions", "import", bad)
    bad.write_bytes(content + b"\0")
    other_store.error("sessions", "import", bad)
    assert not other_store.folder.exists()


def test_a_refused_import_changes_no_file_of_the_store(run: CommandLine, exported: Path) -> None:
    assert run("sessions", "rm", "last") == 0
    before = {p: p.read_bytes() for p in run.folder.rglob("*") if p.is_file()}
    damage(exported, flip(-1))
    assert "does not match its checksum" in run.error("sessions", "import", exported)
    assert {p: p.read_bytes() for p in run.folder.rglob("*") if p.is_file()} == before


@pytest.mark.usefixtures("with_checkpoints")
def test_an_import_refuses_a_newer_format(
    run: CommandLine, other_store: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "newer.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(session_file, "SESSION_FORMAT", 2)
        assert run("sessions", "export", "last", path) == 0
    error = other_store.error("sessions", "import", path)
    assert "format 2; this version reads up to 1" in error
    assert not other_store.folder.exists()


@pytest.mark.parametrize(
    "facts",
    [{"name": 5, "n_tokens": 6}, {"name": "x", "n_tokens": 7}, {"name": "\ud800", "n_tokens": 6}],
    ids=str,
)
def test_an_import_refuses_false_session_facts(
    exported: Path, other_store: CommandLine, facts: dict[str, object]
) -> None:
    forge(exported, facts)
    other_store.error("sessions", "import", exported)
    assert not other_store.folder.exists()


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (0, 1, 3), (1, 2, 3), (0, 0, 1)], ids=str)
def test_an_import_refuses_blocks_that_form_no_chain(
    exported: Path, other_store: CommandLine, order: tuple[int, ...]
) -> None:
    stops = [node.stop for node in chain(HEAD, [30], [31], [32])]
    facts = {"name": "last", "n_tokens": stops[order[-1]]}
    forge(exported, facts, lambda files: [files[n] for n in order], len(order))
    assert "does not continue" in other_store.error("sessions", "import", exported)
    assert not other_store.folder.exists()


def test_an_import_over_the_disk_budget_writes_nothing(
    exported: Path, other_store: CommandLine
) -> None:
    fill(other_store.folder, {})
    error = other_store.error("sessions", "import", exported, "--kvpersist-disk", "1K")
    assert "do not fit" in error
    assert block_files(other_store.folder) == {} and other_store.ids() == {}


def test_an_import_with_a_failed_write_leaves_nothing(
    exported: Path, other_store: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(other_store.folder, {})
    calls: list[Path] = []
    new_file = store_folder.new_file

    def fail_third_file(path: Path) -> Any:
        calls.append(path)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return new_file(path)

    monkeypatch.setattr(store_folder, "new_file", fail_third_file)
    assert "No space left" in other_store.error("sessions", "import", exported)
    assert block_files(other_store.folder) == {} and other_store.ids() == {}


def test_export_replaces_a_file_only_with_force(run: CommandLine, exported: Path) -> None:
    assert "--force" in run.error("sessions", "export", "first", exported)
    assert run.json("sessions", "export", "first", exported, "--force")["name"] == "first"


def test_a_damaged_block_is_not_exported(run: CommandLine, tmp_path: Path) -> None:
    damage(next((run.folder / "blocks").glob(f"*/{chain(HEAD)[0].key.hex()}*")), flip(-1))
    path = tmp_path / "out" / "file.safetensors"
    path.parent.mkdir()
    assert "store verify" in run.error("sessions", "export", "last", path)
    assert list(path.parent.iterdir()) == []


def test_missing_paths_and_folders_are_refused(run: CommandLine, tmp_path: Path) -> None:
    assert "No such file" in run.error("sessions", "import", tmp_path / "nothing")
    run.error("sessions", "import", tmp_path)
    assert "No such file" in run.error("sessions", "export", "last", tmp_path / "no" / "file")


# Checkpoints.


@pytest.fixture
def exported_checkpoints(run: CommandLine, with_checkpoints: Path, tmp_path: Path) -> Path:
    assert with_checkpoints == run.folder
    path = tmp_path / "with-checkpoints.safetensors"
    assert run("sessions", "export", "last", path) == 0
    return path


LAST = chain(HEAD, [30], [31], [32])
CHECKPOINTS = [window(LAST[0]), state(LAST[3]), window(LAST[3])]


def test_an_import_writes_the_same_checkpoint_files(
    run: CommandLine, exported_checkpoints: Path, other_store: CommandLine
) -> None:
    done = other_store.json("sessions", "import", exported_checkpoints)
    assert (done["blocks_written"], done["checkpoints_written"], done["checkpoints"]) == (4, 3, 3)
    assert checkpoint_files(other_store.folder) == checkpoint_files(run.folder)
    assert block_files(other_store.folder).items() <= block_files(run.folder).items()
    assert other_store.json("store", "verify")["ok"]
    store = BlockStore(other_store.folder, LIMITS)
    imported = store.checkpoints([node.key for node in LAST])
    assert {checkpoint for checkpoints in imported.values() for checkpoint in checkpoints} == set(
        CHECKPOINTS
    )
    for checkpoint in CHECKPOINTS:
        assert store.reader.load(checkpoint, ROOT) is not None
    store.close()
    again = other_store.json("sessions", "import", exported_checkpoints)
    assert (again["blocks_written"], again["checkpoints_written"]) == (0, 0)


def test_an_import_replaces_a_missing_checkpoint_file(
    run: CommandLine, exported_checkpoints: Path
) -> None:
    before = checkpoint_files(run.folder)
    checkpoint_path(run.folder, CHECKPOINTS[1].key).unlink()
    done = run.json("sessions", "import", exported_checkpoints)
    assert (done["is_new"], done["blocks_written"], done["checkpoints_written"]) == (False, 0, 1)
    assert checkpoint_files(run.folder) == before and run.json("store", "verify")["ok"]


def test_export_leaves_out_missing_checkpoints(run: CommandLine, with_checkpoints: Path) -> None:
    """A server may remove checkpoints at any time."""
    checkpoint_path(with_checkpoints, CHECKPOINTS[1].key).unlink()
    path = with_checkpoints.parent / "fewer.safetensors"
    assert run("sessions", "export", "last", path) == 0
    source = session_file.SessionFile(path)
    assert set(source.checkpoints) == {CHECKPOINTS[0], CHECKPOINTS[2]}
    source.close()


def test_a_damaged_checkpoint_is_not_exported(run: CommandLine, with_checkpoints: Path) -> None:
    damage(checkpoint_path(with_checkpoints, CHECKPOINTS[1].key), flip(-1))
    path = with_checkpoints.parent / "bad.safetensors"
    assert "store verify" in run.error("sessions", "export", "last", path)
    assert not path.exists()


@FEW_OR_MANY
def test_an_import_refuses_damaged_or_truncated_checkpoints(
    exported_checkpoints: Path, other_store: CommandLine, n: int
) -> None:
    content = exported_checkpoints.read_bytes()
    header = content.index(b"\n") + 1
    bad = exported_checkpoints.with_name("bad.safetensors")
    for position in [
        *evenly_spread(0, header, n),
        *evenly_spread(len(content) - 90_000, len(content), n),
    ]:
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        bad.write_bytes(changed)
        other_store.error("sessions", "import", bad)
        bad.write_bytes(content[:position])
        other_store.error("sessions", "import", bad)
    assert not other_store.folder.exists()


ForgedCheckpoint = tuple[dict[str, str], dict[str, mx.array]]


def forge_checkpoints(exported: Path, forged: list[ForgedCheckpoint]) -> None:
    """Forge an exported file with these checkpoints."""
    checkpoints = []
    scratch = exported.with_name("checkpoint.safetensors")
    for metadata, arrays in forged:
        metadata["checksum"] = checksum(arrays, metadata)
        mx.save_safetensors(str(scratch), arrays, metadata)
        checkpoints.append(scratch.read_bytes())
    forge(exported, None, lambda files: [*files[: len(LAST)], *checkpoints])


def forged_checkpoint(checkpoint: Checkpoint, **changed: str) -> ForgedCheckpoint:
    return {**metadata_of(checkpoint, ROOT), **changed}, arrays_of_checkpoint(checkpoint)


def unrelated_block() -> Block:
    return chain([99])[0]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda: [forged_checkpoint(CHECKPOINTS[1])], ""),
        (
            lambda: [forged_checkpoint(CHECKPOINTS[1]), forged_checkpoint(CHECKPOINTS[1])],
            "belongs to none",
        ),
        (lambda: [forged_checkpoint(state(unrelated_block()))], "belongs to none"),
        (lambda: [forged_checkpoint(CHECKPOINTS[1], root=root_json("another"))], "belongs to none"),
        (lambda: [forged_checkpoint(CHECKPOINTS[1], root=root_json(5))], "wrong types"),
        (lambda: [forged_checkpoint(CHECKPOINTS[1], kind="window-1")], "do not hash"),
        (lambda: [forged_checkpoint(CHECKPOINTS[1], format="9")], "format 9"),
    ],
    ids=["valid", "twice", "other-block", "other-model", "types", "kind", "newer"],
)
def test_an_import_refuses_false_checkpoints(
    exported_checkpoints: Path,
    other_store: CommandLine,
    change: Callable[[], list[ForgedCheckpoint]],
    problem: str,
) -> None:
    forge_checkpoints(exported_checkpoints, change())
    if not problem:
        assert other_store.json("sessions", "import", exported_checkpoints)["checkpoints"] == 1
        return
    assert problem in other_store.error("sessions", "import", exported_checkpoints)
    assert not other_store.folder.exists()


def test_an_import_refuses_a_checkpoint_between_blocks(
    with_checkpoints: Path, exported_checkpoints: Path, other_store: CommandLine
) -> None:
    """Otherwise each file would be stored under another file's key."""
    checkpoint = checkpoint_path(with_checkpoints, CHECKPOINTS[0].key).read_bytes()
    forge(exported_checkpoints, None, lambda files: [files[0], checkpoint, *files[1 : len(LAST)]])
    error = other_store.error("sessions", "import", exported_checkpoints)
    assert "blocks, then checkpoints" in error


def root_json(fingerprint: object) -> str:
    return json.dumps({**json.loads(ROOT.to_json()), "fingerprint": fingerprint})


def test_blocks_without_arrays_are_exported_and_imported(
    run: CommandLine, other_store: CommandLine, tmp_path: Path
) -> None:
    nodes = chain([7], [8])
    store = BlockStore(run.folder, LIMITS)
    keys = tuple(node.key for node in nodes)
    turn = Commit(ROOT, tuple(nodes), Leaf("bare", keys[-1], 2))
    store.commit(turn, [(node, {}) for node in nodes])
    store.drain()
    store.close()
    path = tmp_path / "bare.safetensors"
    for n_checkpoints in (0, 1):
        assert run("sessions", "export", "bare", path, "--force") == 0
        assert other_store("sessions", "import", path) == 0
        assert other_store.json("sessions", "show", "bare")["checkpoints"] == n_checkpoints
        assert other_store.json("store", "verify")["ok"]
        store = BlockStore(run.folder, LIMITS)
        save_turn(store, nodes, "bare", [state(nodes[1])])
        store.close()
    assert block_files(other_store.folder).items() <= block_files(run.folder).items()
    assert checkpoint_files(other_store.folder).items() <= checkpoint_files(run.folder).items()


def test_an_import_ignores_session_facts_of_older_versions(
    other_store: CommandLine, exported: Path
) -> None:
    forge(exported, {"name": "last", "n_tokens": 6, "choices": {"of an older version": {}}})
    assert other_store("sessions", "import", exported) == 0
    assert block_files(other_store.folder)


def test_arrays_without_elements_are_exported_and_imported(
    run: CommandLine, other_store: CommandLine
) -> None:
    """An indexer has such values; a block's file only describes them."""
    node = chain([77])[0]
    checkpoint = state(node)
    empty = {"1.v": mx.zeros((2, 1, 1, 0), mx.bfloat16)}
    mx.eval(empty)
    with closing(BlockStore(run.folder, LIMITS)) as store:
        new: list[Any] = [
            (node, arrays_of(node) | empty),
            (checkpoint, arrays_of_checkpoint(checkpoint) | empty),
        ]
        leaf = Leaf("indexer", node.key, node.stop)
        store.commit(Commit(ROOT, (node,), leaf, checkpoints=(checkpoint,)), new)
    path = run.folder.with_name("indexer.safetensors")
    assert run("sessions", "export", "indexer", path) == 0
    assert other_store("sessions", "import", path) == 0, other_store.err
    with closing(BlockStore(other_store.folder, LIMITS)) as store:
        for record in (node, checkpoint):
            loaded = store.reader.load(record, ROOT)
            assert loaded is not None and loaded.arrays["1.v"].shape == (2, 1, 1, 0)


def test_a_session_file_of_two_conversations_is_refused(tmp_path: Path) -> None:
    """The second block begins at the position at which the first ends."""
    nodes = [chain([1])[0], chain([9], [2])[1]]
    contents = []
    for number, node in enumerate(nodes):
        block_file = tmp_path / f"{number}.safetensors"
        write_block(block_file, node, ROOT, arrays_of(node))
        contents.append(block_file.read_bytes())
    listed = [session_file.Listed.of(content) for content in contents]
    header = session_file.header_of({"name": None, "n_tokens": 2}, 2, listed)
    path = tmp_path / "mixed.safetensors"
    path.write_bytes(header + b"".join(contents))
    with pytest.raises(StoreError, match="block 1 does not continue the one before it"):
        session_file.SessionFile(path)


def test_safetensors_reads_the_block_files_of_an_export(exported: Path) -> None:
    with closing(session_file.SessionFile(exported)) as source:
        for number, node in enumerate(source.blocks):
            tensors = dict(deserialize(source.own_file(number)))  # type: ignore[no-untyped-call]
            expected = arrays_of(node)
            assert {name: tuple(tensor["shape"]) for name, tensor in tensors.items()} == {
                name: array.shape for name, array in expected.items()
            }


def test_an_import_refuses_a_block_with_a_wrong_checksum(
    exported: Path, other_store: CommandLine
) -> None:
    """The header's checksums are right, as if the block was damaged before the export."""
    facts = {"name": "last", "n_tokens": chain(HEAD, [30], [31], [32])[-1].stop}

    def damaged(files: list[bytes]) -> list[bytes]:
        content = bytearray(files[1])
        content[-100] ^= 1
        return [files[0], bytes(content), *files[2:]]

    forge(exported, facts, damaged, 4)
    other_store.error("sessions", "import", exported)
    assert not other_store.folder.exists()


def test_export_accepts_the_longest_file_name(run: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / ("\u6f22" * 85)  # 255 bytes
    path.touch()
    assert run("sessions", "export", "last", path, "--force") == 0, run.err
