"""sessions export and import: the same bytes elsewhere, or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.tiers import session_file
from mlx_lm_kvpersist.tiers.store import BlockStore
from tests.tiers.conftest import ROOT, arrays_of, chain

from .conftest import HEAD, LIMITS, WEIRD_NAME, CommandLine, block_files, damage, fill, flip


@pytest.fixture
def exported(run: CommandLine, tmp_path: Path) -> Path:
    path = tmp_path / "last.safetensors"
    assert run("sessions", "export", "last", path) == 0 and str(path) in run.out
    return path


@pytest.fixture
def other(run: CommandLine, tmp_path: Path) -> CommandLine:
    """A command line for a store that is not there yet."""
    return run.at(tmp_path / "other")


def test_what_is_exported_is_safetensors(exported: Path) -> None:
    loaded: Any = mx.load(str(exported), return_metadata=True)
    arrays, metadata = loaded
    nodes = chain(HEAD, [30], [31], [32])
    for number, node in enumerate(nodes):
        for name, array in arrays_of(node).items():
            assert arrays[f"{number:06}.{name}"].shape == array.shape
    assert json.loads(metadata["session"]) == {"name": "last", "n_tokens": 6}
    assert exported.stat().st_mode & 0o777 == 0o600


def test_the_same_bytes_elsewhere(run: CommandLine, exported: Path, other: CommandLine) -> None:
    done = other.json("sessions", "import", exported, "--create")
    assert done["is_new"] and done["blocks_written"] == 4
    original = block_files(run.folder)
    names = {f"{node.key.hex()}.safetensors" for node in chain(HEAD, [30], [31], [32])}
    assert block_files(other.folder) == {name: original[name] for name in names}
    assert other.ids().keys() == {"last"}
    assert other.json("store", "verify")["ok"]
    # A server finds it by the prompt, and reads what was stored.
    store = BlockStore(other.folder, LIMITS)
    head = store.children(ROOT.key)[0]
    assert head.ids == HEAD and store.load(head, ROOT) is not None
    store.close()


def test_importing_again_changes_nothing(exported: Path, other: CommandLine) -> None:
    first = other.json("sessions", "import", exported, "--create")
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
        assert other("sessions", "import", path, "--create") == 0
    assert other.ids().keys() == {WEIRD_NAME, None}


def spread(start: int, stop: int, n_positions: int = 60) -> list[int]:
    """Return positions from the first to the last, evenly spread."""
    last = stop - start - 1
    return sorted({start + last * n // (n_positions - 1) for n in range(n_positions)})


def test_a_flipped_bit_anywhere_is_refused(exported: Path, other: CommandLine) -> None:
    content = exported.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    bad = exported.with_name("bad.safetensors")
    for position in [*range(8), *spread(8, header, 120), *spread(header, len(content))]:
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        bad.write_bytes(changed)
        other.error("sessions", "import", bad, "--create")
        assert not other.folder.exists(), position


def test_a_truncation_anywhere_is_refused(exported: Path, other: CommandLine) -> None:
    content = exported.read_bytes()
    bad = exported.with_name("bad.safetensors")
    for n_bytes in [*range(10), *spread(10, len(content))]:
        bad.write_bytes(content[:n_bytes])
        assert "no whole exported session" in other.error("sessions", "import", bad, "--create")
    bad.write_bytes(content + b"\0")
    other.error("sessions", "import", bad, "--create")
    assert not other.folder.exists()


def test_a_refused_file_changes_no_store(run: CommandLine, exported: Path) -> None:
    assert run("sessions", "rm", "last") == 0
    before = {p: p.read_bytes() for p in run.folder.rglob("*") if p.is_file()}
    damage(exported, flip(-1))
    assert "does not match its checksum" in run.error("sessions", "import", exported)
    assert {p: p.read_bytes() for p in run.folder.rglob("*") if p.is_file()} == before


def test_a_newer_format_is_refused(
    run: CommandLine, other: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "newer.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(session_file, "SESSION_FORMAT", 2)
        assert run("sessions", "export", "last", path) == 0
    said = other.error("sessions", "import", path, "--create")
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
    source = session_file.SessionFile(exported)
    header = session_file._file_header(json.dumps(about), source._headers)
    bodies = exported.read_bytes()[source._starts[0] :]
    source.close()
    exported.write_bytes(len(header).to_bytes(8, "little") + header + bodies)
    other.error("sessions", "import", exported, "--create")
    assert not other.folder.exists()


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (0, 1, 3), (1, 2, 3), (0, 0, 1)], ids=str)
def test_blocks_that_are_no_chain_are_refused(
    exported: Path, other: CommandLine, order: tuple[int, ...]
) -> None:
    source = session_file.SessionFile(exported)
    headers = [source._headers[number] for number in order]
    bodies = [source.block_bytes(n)[-source._headers[n].n_data_bytes :] for n in order]
    n_tokens = source.nodes[order[-1]].stop
    about = json.dumps({"name": "last", "n_tokens": n_tokens})
    source.close()
    header = session_file._file_header(about, headers)
    exported.write_bytes(len(header).to_bytes(8, "little") + header + b"".join(bodies))
    assert "does not continue" in other.error("sessions", "import", exported, "--create")
    assert not other.folder.exists()


def test_no_room_leaves_nothing(exported: Path, other: CommandLine) -> None:
    fill(other.folder, {})
    said = other.error("sessions", "import", exported, "--kvpersist-disk", "1K")
    assert "does not fit" in said
    assert block_files(other.folder) == {} and other.ids() == {}


def test_a_failed_write_leaves_nothing(
    exported: Path, other: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(other.folder, {})
    calls: list[Path] = []

    def full(path: Path) -> None:
        calls.append(path)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(session_file, "sync", full)
    assert "No space left" in other.error("sessions", "import", exported)
    assert block_files(other.folder) == {} and other.ids() == {}


def test_import_makes_a_store_only_when_told(exported: Path, other: CommandLine) -> None:
    assert "there is no store" in other.error("sessions", "import", exported)
    assert not other.folder.exists()


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
    assert "cannot be exported" in run.error("sessions", "export", "last", tmp_path / "no" / "file")
