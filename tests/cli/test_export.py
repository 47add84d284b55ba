"""sessions export and import: the same bytes elsewhere, or nothing."""

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
def other(run: CommandLine, tmp_path: Path) -> CommandLine:
    """A command line for a store that does not exist yet."""
    return run.at(tmp_path / "other")


def test_what_is_exported_holds_the_stores_files(run: CommandLine, exported: Path) -> None:
    content, files = exported.read_bytes(), block_files(run.folder)
    for node in chain(HEAD, [30], [31], [32]):
        assert files[f"{node.key.hex()}.safetensors"] in content
    assert json.loads(content.split(b"\n")[0])["session"] == {"name": "last", "n_tokens": 6}
    assert exported.stat().st_mode & 0o777 == 0o600


def forge(
    exported: Path,
    about: Any = None,
    files: Callable[[list[bytes]], list[bytes]] = lambda files: files,
    n_blocks: int | None = None,
) -> None:
    """Write an exported file again, with all its checksums right."""
    with closing(session_file.SessionFile(exported)) as source:
        contents = files([source.own_file(n) for n in range(len(source.files))])
        n_blocks = len(source.blocks) if n_blocks is None else n_blocks
        about = about or {"name": source.name, "n_tokens": source.blocks[-1].stop}
    listed = [session_file.Listed.of(content) for content in contents]
    exported.write_bytes(session_file.header_of(about, n_blocks, listed) + b"".join(contents))


def test_the_same_bytes_elsewhere(run: CommandLine, exported: Path, other: CommandLine) -> None:
    done = other.json("sessions", "import", exported)
    assert done["is_new"] and done["blocks_written"] == 4
    original = block_files(run.folder)
    names = {f"{node.key.hex()}.safetensors" for node in chain(HEAD, [30], [31], [32])}
    assert block_files(other.folder) == {name: original[name] for name in names}
    assert other.ids().keys() == {"last"}
    assert other.json("store", "verify")["ok"]
    # A server finds the session by its prompt, and reads its blocks.
    store = BlockStore(other.folder, LIMITS)
    head = store.children(ROOT.key)[0]
    assert head.ids == HEAD and store.reader.load(head, ROOT) is not None
    store.close()


def test_importing_again_changes_nothing(exported: Path, other: CommandLine) -> None:
    first = other.json("sessions", "import", exported)
    again = other.json("sessions", "import", exported)
    assert (again["id"], again["is_new"], again["blocks_written"]) == (first["id"], False, 0)
    fill(other.folder, {"last": chain(HEAD, [30], [31], [32], [33])})
    assert other("sessions", "import", exported) == 0 and "was there" in other.out
    assert other.json("sessions", "show", "last")["blocks"] == 5


def test_a_session_goes_on(exported: Path, other: CommandLine) -> None:
    fill(other.folder, {"last": chain(HEAD, [30])})
    session_id = other.ids()["last"]
    done = other.json("sessions", "import", exported)
    assert (done["id"], done["blocks_written"], done["blocks"]) == (session_id, 2, 4)
    assert len(other.ids()) == 1


def test_a_session_that_goes_to_make_room_is_added(
    exported: Path, other: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = chain(HEAD, [30], [31], [32], [33])
    fill(other.folder, {"last": nodes})
    with closing(DiskStore(other.folder, LIMITS)) as disk:
        block_path(other.folder, nodes[0].key).unlink()
        make_room = disk.make_room

        def evict(n_bytes: int, keep: Collection[bytes], *others: Any) -> bool:
            disk.forget(nodes[-1].key)
            return make_room(n_bytes, keep, *others)

        monkeypatch.setattr(disk, "make_room", evict)
        with closing(session_file.SessionFile(exported)) as source:
            session, written, is_new = session_file.import_session(disk, source)
        assert is_new and len(written) == 1
        assert disk.index.sessions() == [session] and session.leaf == nodes[-2].key


def test_back_into_its_own_store(run: CommandLine, exported: Path) -> None:
    before, files = run.ids(), block_files(run.folder)
    assert run.json("sessions", "import", exported)["blocks_written"] == 0
    assert run("sessions", "rm", "last") == 0
    assert run.json("sessions", "import", exported)["blocks_written"] == 3
    assert block_files(run.folder) == files and run.ids().keys() == before.keys()


def test_a_lost_file_comes_back(run: CommandLine, exported: Path) -> None:
    files = block_files(run.folder)
    next((run.folder / "blocks").glob(f"*/{chain(HEAD)[0].key.hex()}*")).unlink()
    assert run.json("sessions", "import", exported)["blocks_written"] == 1
    assert block_files(run.folder) == files and run.json("store", "verify")["ok"]


def test_weird_and_missing_names_travel(
    run: CommandLine, other: CommandLine, tmp_path: Path
) -> None:
    fill(run.folder, {WEIRD_NAME: chain([7])})
    for number, name in enumerate((WEIRD_NAME, None)):
        path = tmp_path / f"{number}.safetensors"
        assert run("sessions", "export", run.ids()[name], path) == 0
        assert other("sessions", "import", path) == 0
    assert other.ids().keys() == {WEIRD_NAME, None}


def spread(start: int, stop: int, n_positions: int = 60) -> list[int]:
    """Return positions from the first to the last, evenly spread."""
    last = stop - start - 1
    return sorted({start + last * n // (n_positions - 1) for n in range(n_positions)})


FEW_OR_MANY = pytest.mark.parametrize("n", [25, pytest.param(120, marks=pytest.mark.slow)])
"""The number of places where a file is damaged, one after another."""


@FEW_OR_MANY
def test_a_flipped_bit_anywhere_is_refused(exported: Path, other: CommandLine, n: int) -> None:
    content = exported.read_bytes()
    header = content.index(b"\n") + 1
    bad = exported.with_name("bad.safetensors")
    for position in [*spread(0, header, n), *spread(header, len(content), n)]:
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        bad.write_bytes(changed)
        other.error("sessions", "import", bad)
        assert not other.folder.exists(), position


def test_a_truncation_anywhere_is_refused(exported: Path, other: CommandLine) -> None:
    content = exported.read_bytes()
    bad = exported.with_name("bad.safetensors")
    for n_bytes in [*range(10), *spread(10, len(content))]:
        bad.write_bytes(content[:n_bytes])
        assert "not a complete exported session" in other.error("sessions", "import", bad)
    bad.write_bytes(content + b"\0")
    other.error("sessions", "import", bad)
    assert not other.folder.exists()


def test_a_refused_file_changes_no_store(run: CommandLine, exported: Path) -> None:
    assert run("sessions", "rm", "last") == 0
    before = {p: p.read_bytes() for p in run.folder.rglob("*") if p.is_file()}
    damage(exported, flip(-1))
    assert "does not match its checksum" in run.error("sessions", "import", exported)
    assert {p: p.read_bytes() for p in run.folder.rglob("*") if p.is_file()} == before


@pytest.mark.usefixtures("with_checkpoints")
def test_a_newer_format_is_refused(
    run: CommandLine, other: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "newer.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(session_file, "SESSION_FORMAT", 2)
        assert run("sessions", "export", "last", path) == 0
    said = other.error("sessions", "import", path)
    assert "format 2; this version reads up to 1" in said
    assert not other.folder.exists()


@pytest.mark.parametrize(
    "about",
    [{"name": 5, "n_tokens": 6}, {"name": "x", "n_tokens": 7}, {"name": "\ud800", "n_tokens": 6}],
    ids=str,
)
def test_a_well_made_lie_is_refused(
    exported: Path, other: CommandLine, about: dict[str, object]
) -> None:
    forge(exported, about)
    other.error("sessions", "import", exported)
    assert not other.folder.exists()


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (0, 1, 3), (1, 2, 3), (0, 0, 1)], ids=str)
def test_blocks_that_are_no_chain_are_refused(
    exported: Path, other: CommandLine, order: tuple[int, ...]
) -> None:
    stops = [node.stop for node in chain(HEAD, [30], [31], [32])]
    about = {"name": "last", "n_tokens": stops[order[-1]]}
    forge(exported, about, lambda files: [files[n] for n in order], len(order))
    assert "does not continue" in other.error("sessions", "import", exported)
    assert not other.folder.exists()


def test_no_room_leaves_nothing(exported: Path, other: CommandLine) -> None:
    fill(other.folder, {})
    said = other.error("sessions", "import", exported, "--kvpersist-disk", "1K")
    assert "do not fit" in said
    assert block_files(other.folder) == {} and other.ids() == {}


def test_a_failed_write_leaves_nothing(
    exported: Path, other: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(other.folder, {})
    calls: list[Path] = []
    new_file = store_folder.new_file

    def full(path: Path) -> Any:
        calls.append(path)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return new_file(path)

    monkeypatch.setattr(store_folder, "new_file", full)
    assert "No space left" in other.error("sessions", "import", exported)
    assert block_files(other.folder) == {} and other.ids() == {}


def test_export_replaces_no_file_unless_told(run: CommandLine, exported: Path) -> None:
    assert "--force" in run.error("sessions", "export", "first", exported)
    assert run.json("sessions", "export", "first", exported, "--force")["name"] == "first"


def test_a_damaged_block_is_not_exported(run: CommandLine, tmp_path: Path) -> None:
    damage(next((run.folder / "blocks").glob(f"*/{chain(HEAD)[0].key.hex()}*")), flip(-1))
    path = tmp_path / "out" / "file.safetensors"
    path.parent.mkdir()
    assert "store verify" in run.error("sessions", "export", "last", path)
    assert list(path.parent.iterdir()) == []


def test_files_that_cannot_be_used(run: CommandLine, tmp_path: Path) -> None:
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


def test_the_same_checkpoints_elsewhere(
    run: CommandLine, exported_checkpoints: Path, other: CommandLine
) -> None:
    done = other.json("sessions", "import", exported_checkpoints)
    assert (done["blocks_written"], done["checkpoints_written"], done["checkpoints"]) == (4, 3, 3)
    assert checkpoint_files(other.folder) == checkpoint_files(run.folder)
    assert block_files(other.folder).items() <= block_files(run.folder).items()
    assert other.json("store", "verify")["ok"]
    store = BlockStore(other.folder, LIMITS)
    found = store.checkpoints([node.key for node in LAST])
    assert {checkpoint for checkpoints in found.values() for checkpoint in checkpoints} == set(
        CHECKPOINTS
    )
    for checkpoint in CHECKPOINTS:
        assert store.reader.load(checkpoint, ROOT) is not None
    store.close()
    again = other.json("sessions", "import", exported_checkpoints)
    assert (again["blocks_written"], again["checkpoints_written"]) == (0, 0)


def test_lost_checkpoints_come_back(run: CommandLine, exported_checkpoints: Path) -> None:
    before = checkpoint_files(run.folder)
    checkpoint_path(run.folder, CHECKPOINTS[1].key).unlink()
    done = run.json("sessions", "import", exported_checkpoints)
    assert (done["is_new"], done["blocks_written"], done["checkpoints_written"]) == (False, 0, 1)
    assert checkpoint_files(run.folder) == before and run.json("store", "verify")["ok"]


def test_checkpoints_that_went_are_not_exported(run: CommandLine, with_checkpoints: Path) -> None:
    """A server may remove them at any time."""
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
def test_flipped_bits_and_truncations_with_checkpoints_are_refused(
    exported_checkpoints: Path, other: CommandLine, n: int
) -> None:
    content = exported_checkpoints.read_bytes()
    header = content.index(b"\n") + 1
    bad = exported_checkpoints.with_name("bad.safetensors")
    for position in [*spread(0, header, n), *spread(len(content) - 90_000, len(content), n)]:
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        bad.write_bytes(changed)
        other.error("sessions", "import", bad)
        bad.write_bytes(content[:position])
        other.error("sessions", "import", bad)
    assert not other.folder.exists()


Made = tuple[dict[str, str], dict[str, mx.array]]


def checkpoints_rewritten(exported: Path, made_checkpoints: list[Made]) -> None:
    """Forge an exported file that has other checkpoints (metadata, arrays)."""
    checkpoints = []
    scratch = exported.with_name("checkpoint.safetensors")
    for metadata, arrays in made_checkpoints:
        metadata["checksum"] = checksum(arrays, metadata)
        mx.save_safetensors(str(scratch), arrays, metadata)
        checkpoints.append(scratch.read_bytes())
    forge(exported, None, lambda files: [*files[: len(LAST)], *checkpoints])


def made(checkpoint: Checkpoint, **changed: str) -> Made:
    return {**metadata_of(checkpoint, ROOT), **changed}, arrays_of_checkpoint(checkpoint)


def elsewhere() -> Block:
    return chain([99])[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda: [made(CHECKPOINTS[1])], ""),
        (lambda: [made(CHECKPOINTS[1]), made(CHECKPOINTS[1])], "belongs to none"),
        (lambda: [made(state(elsewhere()))], "belongs to none"),
        (lambda: [made(CHECKPOINTS[1], root=chain_root("another"))], "belongs to none"),
        (lambda: [made(CHECKPOINTS[1], root=chain_root(5))], "wrong types"),
        (lambda: [made(CHECKPOINTS[1], kind="window-1")], "do not hash"),
        (lambda: [made(CHECKPOINTS[1], format="9")], "format 9"),
    ],
    ids=["none", "twice", "elsewhere", "another-model", "types", "kind", "newer"],
)
def test_a_well_made_lie_about_checkpoints_is_refused(
    exported_checkpoints: Path, other: CommandLine, change: Callable[[], list[Made]], said: str
) -> None:
    checkpoints_rewritten(exported_checkpoints, change())
    if not said:
        assert other.json("sessions", "import", exported_checkpoints)["checkpoints"] == 1
        return
    assert said in other.error("sessions", "import", exported_checkpoints)
    assert not other.folder.exists()


def test_checkpoints_among_blocks_are_refused(
    with_checkpoints: Path, exported_checkpoints: Path, other: CommandLine
) -> None:
    """Else each file would be stored under the key of another."""
    checkpoint = checkpoint_path(with_checkpoints, CHECKPOINTS[0].key).read_bytes()
    forge(exported_checkpoints, None, lambda files: [files[0], checkpoint, *files[1 : len(LAST)]])
    said = other.error("sessions", "import", exported_checkpoints)
    assert "blocks, then checkpoints" in said


def chain_root(fingerprint: object) -> str:
    return json.dumps({**json.loads(ROOT.to_json()), "fingerprint": fingerprint})


def test_blocks_without_arrays_travel(run: CommandLine, other: CommandLine, tmp_path: Path) -> None:
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
        assert other("sessions", "import", path) == 0
        assert other.json("sessions", "show", "bare")["checkpoints"] == n_checkpoints
        assert other.json("store", "verify")["ok"]
        store = BlockStore(run.folder, LIMITS)
        save_turn(store, nodes, "bare", [state(nodes[1])])
        store.close()
    assert block_files(other.folder).items() <= block_files(run.folder).items()
    assert checkpoint_files(other.folder).items() <= checkpoint_files(run.folder).items()


def test_what_older_versions_added_about_a_session_is_passed_over(
    other: CommandLine, exported: Path
) -> None:
    forge(exported, {"name": "last", "n_tokens": 6, "choices": {"of an older version": {}}})
    assert other("sessions", "import", exported) == 0
    assert block_files(other.folder)


def test_arrays_without_elements_go_along(run: CommandLine, other: CommandLine) -> None:
    """The values of an indexer: the file of a block only describes them."""
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
    assert other("sessions", "import", path) == 0, other.err
    with closing(BlockStore(other.folder, LIMITS)) as store:
        for what in (node, checkpoint):
            loaded = store.reader.load(what, ROOT)
            assert loaded is not None and loaded.arrays["1.v"].shape == (2, 1, 1, 0)


def test_blocks_of_two_conversations_are_no_session(tmp_path: Path) -> None:
    """Both are whole, and the second begins where the first ends."""
    nodes = [chain([1])[0], chain([9], [2])[1]]
    contents = []
    for number, node in enumerate(nodes):
        checkpoint = tmp_path / f"{number}.safetensors"
        write_block(checkpoint, node, ROOT, arrays_of(node))
        contents.append(checkpoint.read_bytes())
    listed = [session_file.Listed.of(content) for content in contents]
    header = session_file.header_of({"name": None, "n_tokens": 2}, 2, listed)
    path = tmp_path / "mixed.safetensors"
    path.write_bytes(header + b"".join(contents))
    with pytest.raises(StoreError, match="block 1 does not continue the one before it"):
        session_file.SessionFile(path)


def test_the_safetensors_library_opens_the_files_of_an_exported_session(exported: Path) -> None:
    with closing(session_file.SessionFile(exported)) as source:
        for number, node in enumerate(source.blocks):
            found = dict(deserialize(source.own_file(number)))  # type: ignore[no-untyped-call]
            expected = arrays_of(node)
            assert {name: tuple(one["shape"]) for name, one in found.items()} == {
                name: array.shape for name, array in expected.items()
            }


def test_a_file_whose_arrays_do_not_match_its_own_checksum_is_refused(
    exported: Path, other: CommandLine
) -> None:
    """The checksums of the header are right, as if the damage had come before them."""
    about = {"name": "last", "n_tokens": chain(HEAD, [30], [31], [32])[-1].stop}

    def damaged(files: list[bytes]) -> list[bytes]:
        content = bytearray(files[1])
        content[-100] ^= 1
        return [files[0], bytes(content), *files[2:]]

    forge(exported, about, damaged, 4)
    other.error("sessions", "import", exported)
    assert not other.folder.exists()


def test_an_export_may_have_as_long_a_name_as_the_file_system_takes(
    run: CommandLine, tmp_path: Path
) -> None:
    path = tmp_path / ("\u6f22" * 85)  # 255 bytes
    path.touch()
    assert run("sessions", "export", "last", path, "--force") == 0, run.err
