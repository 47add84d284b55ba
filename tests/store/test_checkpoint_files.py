from __future__ import annotations

import os
import stat
from io import BytesIO
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.block import Checkpoint, Root
from mlx_lm_kvpersist.errors import BlockCorrupt, StoreFormatError
from mlx_lm_kvpersist.store.files import FORMAT, checksum, file_bytes, metadata_of, record_in
from tests.support.store_files import checkpoint_path, read_file, read_record, write_block

from .conftest import ROOT, arrays_of_checkpoint, chain, state

CHECKPOINT = state(chain([1, 2, 3])[0])


def write(folder: Path, checkpoint: Checkpoint = CHECKPOINT, root: Root = ROOT) -> Path:
    write_block(
        checkpoint_path(folder, checkpoint.key), checkpoint, root, arrays_of_checkpoint(checkpoint)
    )
    return checkpoint_path(folder, checkpoint.key)


def test_checkpoint_key_depends_on_block_kind_and_token_count() -> None:
    block = bytes(range(16))
    fields = [(block, "state", 0), (block, "state", 1), (block, "window-512", 0)]
    assert len({Checkpoint.at(*each).key for each in (*fields, (block[::-1], "state", 0))}) == 4


def test_written_checkpoint_file_is_read_back_unchanged(tmp_path: Path) -> None:
    arrays = arrays_of_checkpoint(CHECKPOINT)
    size = write_block(checkpoint_path(tmp_path, CHECKPOINT.key), CHECKPOINT, ROOT, arrays)
    path = checkpoint_path(tmp_path, CHECKPOINT.key)
    assert (
        path
        == tmp_path
        / "checkpoints"
        / CHECKPOINT.key.hex()[:2]
        / f"{CHECKPOINT.key.hex()}.safetensors"
    )
    assert size == path.stat().st_size
    checkpoint, root, loaded = read_file(checkpoint_path(tmp_path, CHECKPOINT.key))
    assert (checkpoint, root) == (CHECKPOINT, ROOT)
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype and mx.array_equal(loaded[name], array)
    assert read_record(path)[:2] == (CHECKPOINT, ROOT)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    path = write(tmp_path)
    before = path.read_bytes(), path.stat().st_ino
    with pytest.raises(FileExistsError):
        write_block(path, CHECKPOINT, ROOT, {"other": mx.zeros(3)})
    assert (path.read_bytes(), path.stat().st_ino) == before


def test_non_contiguous_and_scalar_arrays_are_stored(tmp_path: Path) -> None:
    """A transposed view, a slice and a scalar keep their values and checksum."""
    square = mx.arange(64, dtype=mx.bfloat16).reshape(8, 8)
    arrays = {
        "transposed": square.T,
        "slice": square[2:6, ::3],
        "scalar": mx.array(7, mx.int64),
    }
    mx.eval(arrays)
    write_block(checkpoint_path(tmp_path, CHECKPOINT.key), CHECKPOINT, ROOT, arrays)
    _, _, loaded = read_file(checkpoint_path(tmp_path, CHECKPOINT.key))
    for name, array in arrays.items():
        assert loaded[name].shape == array.shape and mx.array_equal(loaded[name], array), name
    copies = {name: mx.contiguous(array) for name, array in arrays.items()}
    assert checksum(arrays, {}) == checksum(copies, {})


@pytest.mark.parametrize("n_arrays", [0, 1, 200])
def test_checkpoint_file_is_no_larger_than_predicted(tmp_path: Path, n_arrays: int) -> None:
    root = Root("f" * 64, "4b64", 'a "quoted" namespace\\' * 40, "s" * 64, model="/m/ü\n" * 200)
    names = [f"{'layer' * 10}.{n}" for n in range(n_arrays)]
    arrays = {name: mx.zeros((1, 2, 3, 4, 5)) for name in names}
    mx.eval(arrays)
    size = write_block(checkpoint_path(tmp_path, CHECKPOINT.key), CHECKPOINT, root, arrays)
    assert size <= file_bytes(metadata_of(CHECKPOINT, root), arrays)


def test_flipped_bits_are_detected_or_change_nothing(tmp_path: Path) -> None:
    path = write(tmp_path)
    arrays = arrays_of_checkpoint(CHECKPOINT)
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    positions = [*range(header), *range(header, len(content), len(content) // 200)]
    n_corrupt = 0
    for position in positions:
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        try:
            checkpoint, root, loaded = read_file(checkpoint_path(tmp_path, CHECKPOINT.key))
        except BlockCorrupt:
            n_corrupt += 1
            continue
        # A flip in the header's padding changes neither record nor arrays.
        assert (checkpoint, root) == (CHECKPOINT, ROOT), position
        assert checksum(loaded, {}) == checksum(arrays, {}), position
    assert n_corrupt > 0.9 * len(positions)


def test_a_truncated_file_is_corrupt(tmp_path: Path) -> None:
    path = write(tmp_path)
    content = path.read_bytes()
    for n_bytes in [*range(0, 600, 7), *range(600, len(content), len(content) // 40)]:
        path.write_bytes(content[:n_bytes])
        with pytest.raises(BlockCorrupt):
            read_file(checkpoint_path(tmp_path, CHECKPOINT.key))


def test_a_renamed_file_is_corrupt(tmp_path: Path) -> None:
    other = state(chain([9])[0])
    path = checkpoint_path(tmp_path, other.key)
    path.parent.mkdir(parents=True)
    write(tmp_path).rename(path)
    with pytest.raises(BlockCorrupt, match="holds checkpoint"):
        read_file(checkpoint_path(tmp_path, other.key))


def test_reading_a_missing_file_raises_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_file(checkpoint_path(tmp_path, CHECKPOINT.key))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "window-512"),
        ("n_tokens", "1"),
        ("n_tokens", "many"),
        ("n_tokens", str(1 << 40)),
        ("block", "00" * 16),
        ("key", "zz"),
        ("root", "{}"),
        ("root", None),
    ],
)
def test_inconsistent_metadata_is_corrupt(tmp_path: Path, field: str, value: str | None) -> None:
    metadata = metadata_of(CHECKPOINT, ROOT)
    del metadata[field]
    if value is not None:
        metadata[field] = value
    mx.save_safetensors(str(tmp_path / "lie.safetensors"), {}, metadata)
    content = (tmp_path / "lie.safetensors").read_bytes()
    with pytest.raises(BlockCorrupt):
        record_in(BytesIO(content), "lie")


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    metadata = {**metadata_of(CHECKPOINT, ROOT), "format": str(FORMAT + 1)}
    path = checkpoint_path(tmp_path, CHECKPOINT.key)
    os.makedirs(path.parent)
    mx.save_safetensors(str(path), {}, metadata)
    with pytest.raises(StoreFormatError, match=f"a file of format {FORMAT + 1}"):
        read_file(checkpoint_path(tmp_path, CHECKPOINT.key))
