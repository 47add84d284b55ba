from __future__ import annotations

import errno
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors import safe_open

from mlx_lm_kvpersist.block import Block, pack_ids
from mlx_lm_kvpersist.errors import BlockCorrupt
from mlx_lm_kvpersist.store import files
from mlx_lm_kvpersist.store.block_store import BlockStore
from mlx_lm_kvpersist.store.encryption import Cipher
from mlx_lm_kvpersist.store.files import checksum, metadata_of, read_header
from mlx_lm_kvpersist.store.folder import (
    PLAIN,
    Encryption,
    OwnFiles,
    Staging,
    open_regular,
    staged_bytes,
)
from tests.support.store_files import block_path, read_file, read_record, write_block

from .conftest import ROOT, arrays_of, chain, save_turn

NODE = Block(
    key=chain([1, 2, 3])[0].key,
    parent=ROOT.key,
    start=0,
    packed_ids=chain([1, 2, 3])[0].packed_ids,
    text='a "quoted" text\n\0 🎉',
    pending=b"\xe2\x82",
)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("has_cuda", [False, True], ids=["without-cuda", "with-cuda"])
def test_written_block_file_is_read_back_unchanged(
    tmp_path: Path, dtype: mx.Dtype, has_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx.cuda, "is_available", lambda: has_cuda)
    arrays = {name: a.astype(dtype) for name, a in arrays_of(NODE).items()}
    arrays["0.v"] = mx.zeros((2, 1, 3, 0), dtype)  # an indexer has only keys
    mx.eval(arrays)
    size = write_block(block_path(tmp_path, NODE.key), NODE, ROOT, arrays)
    path = block_path(tmp_path, NODE.key)
    assert size == path.stat().st_size
    node, root, loaded = read_file(block_path(tmp_path, NODE.key))
    assert (node, root) == (NODE, ROOT)
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert loaded[name].dtype == dtype
        assert mx.array_equal(loaded[name], array)
    assert read_record(path)[:2] == (NODE, ROOT)


@pytest.mark.parametrize("encryption", [PLAIN, Cipher(bytes(32))], ids=["plain", "encrypted"])
def test_arrays_of_every_dtype_are_read_back_unchanged(
    tmp_path: Path, encryption: Encryption
) -> None:
    integers = [mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64]
    others = [mx.bool_, mx.float16, mx.bfloat16, mx.float32, mx.complex64]
    arrays = {str(dtype): mx.ones((3,), dtype) for dtype in (*integers, *others)}
    mx.eval(arrays)
    own = OwnFiles(tmp_path, encryption)
    path = own.path_of(NODE.key, NODE.folder)
    files.write_block(path, NODE, ROOT, arrays, own)
    _, _, loaded = files.read_file(path, own)
    assert {name: (x.dtype, x.tolist()) for name, x in loaded.items()} == {
        name: (x.dtype, x.tolist()) for name, x in arrays.items()
    }


@pytest.mark.parametrize("is_gone", [False, True])
def test_failed_read_of_an_intact_file_raises_os_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    """Another process may have evicted the file; otherwise the machine is at fault."""
    path = block_path(tmp_path, NODE.key)
    write_block(path, NODE, ROOT, arrays_of(NODE))

    def fail(name: str) -> None:
        if is_gone:
            path.unlink()
        raise RuntimeError("bad luck")

    monkeypatch.setattr(mx, "load", fail)
    with pytest.raises(OSError) as error:
        read_file(path)
    assert isinstance(error.value, FileNotFoundError) == is_gone


def test_writer_reads_copies_of_arrays_on_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read by the host would move the pool's arrays out of the GPU's memory."""
    arrays, read = arrays_of(NODE), []

    def record_read(array: Any) -> memoryview:
        read.append(array)
        return memoryview(array)

    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(files, "memoryview", record_read, raising=False)
    write_block(block_path(tmp_path, NODE.key), NODE, ROOT, arrays)
    assert len(read) >= len(arrays)
    assert not any(item is array for item in read for array in arrays.values())


@pytest.mark.parametrize(
    "empty",
    [
        "[",
        "[" * 9999,
        '["a"]',
        '{"a": 1}',
        '{"a": ["nothing", [0]]}',
        '{"a": ["float32", ["x"]]}',
        '{"a": ["float32", [1099511627776, 0]]}',
        '{"a": ["float32", [2000000000, 2000000000]]}',
    ],
)
def test_invalid_description_of_empty_arrays_is_corrupt(
    tmp_path: Path, empty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = {**metadata_of(NODE, ROOT), "empty": empty}
    monkeypatch.setattr("mlx_lm_kvpersist.store.files.metadata_of", lambda *_: metadata)
    path = block_path(tmp_path, NODE.key)
    write_block(path, NODE, ROOT, arrays_of(NODE))
    with pytest.raises(BlockCorrupt, match="metadata cannot be read"):
        read_file(path)


def test_loaded_arrays_can_be_used_in_another_thread(tmp_path: Path) -> None:
    """MLX raises if another thread made the array and did not evaluate it."""
    written = {"0.k": mx.ones((2, 1, 3, 8)), "0.v": mx.zeros((2, 1, 3, 0), mx.bfloat16)}
    mx.eval(written)
    path = block_path(tmp_path, NODE.key)
    write_block(path, NODE, ROOT, written)
    with ThreadPoolExecutor(1) as reader:
        _, _, arrays = reader.submit(read_file, path).result()
    for array in arrays.values():
        mx.eval(mx.concatenate([array, array], axis=2))


@pytest.mark.parametrize("other", [{"packed_ids": pack_ids([1, 2, 4])}, {"start": 3}])
def test_file_of_another_block_is_quarantined(store: BlockStore, other: dict[str, Any]) -> None:
    save_turn(store, [NODE])
    store.pool.clear()
    assert store.reader.load(NODE, ROOT) is not None
    store.pool.clear()
    assert store.reader.load(replace(NODE, **other), ROOT) is None
    store.drain()
    assert store.blocks_quarantined == 1


def test_only_the_owner_may_read_files_and_folders(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        write_block(block_path(tmp_path / "store", NODE.key), NODE, ROOT, arrays_of(NODE))
    finally:
        os.umask(old)
    for path in (tmp_path / "store").rglob("*"):
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_a_block_is_never_overwritten(tmp_path: Path) -> None:
    write_block(block_path(tmp_path, NODE.key), NODE, ROOT, arrays_of(NODE))
    path = block_path(tmp_path, NODE.key)
    before = path.read_bytes(), path.stat().st_ino
    with pytest.raises(FileExistsError):
        write_block(path, NODE, ROOT, {"other": mx.zeros(3)})
    assert (path.read_bytes(), path.stat().st_ino) == before


def test_failed_write_leaves_no_files(tmp_path: Path) -> None:
    def write(path: Path) -> int:
        write_block(path, NODE, ROOT, arrays_of(NODE))
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"), closing(Staging(OwnFiles(tmp_path))) as staging:
        staging.announce(100)
        write(staging.path(NODE.key))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_failed_announcement_of_space_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files = OwnFiles(tmp_path)
    with closing(Staging(files)) as staging:
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
            patch.setattr(os, "pwrite", full)
            staging.announce(100)
        staging.announce(1)
        assert staged_bytes(files) == (1, 0)
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
            patch.setattr(os, "pwrite", full)
            staging.announce(-1)
        staging.announce(2)
        assert staged_bytes(files) == (2, 0)  # the returned byte no longer counts


def test_flipped_bits_are_detected_or_change_nothing(tmp_path: Path) -> None:
    arrays = arrays_of(NODE)
    write_block(block_path(tmp_path, NODE.key), NODE, ROOT, arrays)
    path = block_path(tmp_path, NODE.key)
    content = path.read_bytes()
    positions = range(0, len(content), max(1, len(content) // 200))
    n_corrupt = 0
    for position in positions:
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        try:
            node, root, loaded = read_file(block_path(tmp_path, NODE.key))
        except BlockCorrupt:
            n_corrupt += 1
            continue
        # A flip in the header's padding changes neither record nor arrays.
        assert (node, root) == (NODE, ROOT)
        assert checksum(loaded, {}) == checksum(arrays, {})
    assert n_corrupt > 0.9 * len(positions)


@pytest.mark.parametrize("n_missing", [1, 100, 400, None])
def test_a_truncated_file_is_corrupt(tmp_path: Path, n_missing: int | None) -> None:
    size = write_block(block_path(tmp_path, NODE.key), NODE, ROOT, arrays_of(NODE))
    os.truncate(block_path(tmp_path, NODE.key), 0 if n_missing is None else size - n_missing)
    with pytest.raises(BlockCorrupt):
        read_file(block_path(tmp_path, NODE.key))


def test_a_renamed_file_is_corrupt(tmp_path: Path) -> None:
    other = chain([9, 9])[0]
    write_block(block_path(tmp_path, NODE.key), NODE, ROOT, arrays_of(NODE))
    path = block_path(tmp_path, other.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    block_path(tmp_path, NODE.key).rename(path)
    with pytest.raises(BlockCorrupt, match="holds block"):
        read_file(block_path(tmp_path, other.key))


def test_open_regular_refuses_links_and_pipes(tmp_path: Path) -> None:
    """A link's target is read only with `follow`, and a pipe is not waited for."""
    (real := tmp_path / "real").write_bytes(b"content")
    (link := tmp_path / "link").symlink_to(real)
    os.mkfifo(pipe := tmp_path / "pipe")
    for path in (link, pipe):
        with pytest.raises(BlockCorrupt, match=f"{path.name}: is not a regular file"):
            open_regular(path)
    for path, follow in ((real, False), (link, True)):
        with open_regular(path, follow=follow) as file:
            assert file.read() == b"content"
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "nothing")


def test_reading_a_missing_file_raises_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_file(block_path(tmp_path, NODE.key))


def test_file_with_bytes_after_its_arrays_is_corrupt(tmp_path: Path) -> None:
    path = block_path(tmp_path, NODE.key)
    write_block(path, NODE, ROOT, arrays_of(NODE))
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(BlockCorrupt, match="should have"):
        read_file(path)


@pytest.mark.parametrize("offsets", [[4, 8], [0, 8], [0, 3]])
def test_header_with_wrong_array_offsets_is_refused(offsets: list[int]) -> None:
    array = {"dtype": "U32", "shape": [1], "data_offsets": offsets}
    with pytest.raises(ValueError, match="a takes 4 bytes"):
        header = json.dumps({"__metadata__": {}, "a": array}).encode()
        read_header(BytesIO(len(header).to_bytes(8, "little") + header + bytes(4)))


def test_header_with_a_shape_too_large_for_mlx_is_refused() -> None:
    """MLX would raise a RuntimeError, as if this machine could not read the file."""
    array = {"dtype": "U32", "shape": [0, 1 << 70], "data_offsets": [0, 0]}
    with pytest.raises(ValueError, match="shape"):
        header = json.dumps({"__metadata__": {}, "a": array}).encode()
        read_header(BytesIO(len(header).to_bytes(8, "little") + header))


def test_the_safetensors_library_opens_a_block_file(tmp_path: Path) -> None:
    node, arrays = chain([1, 2, 3])[0], {"0.k": mx.arange(24).reshape(2, 3, 4)}
    mx.eval(arrays)
    path = block_path(tmp_path, node.key)
    path.parent.mkdir(parents=True)
    write_block(path, node, ROOT, arrays)
    with safe_open(str(path), "numpy") as opened:
        assert opened.metadata()["key"] == node.key.hex()
        assert [*opened.keys()] == ["0.k"]
        assert np.array_equal(opened.get_tensor("0.k"), np.array(arrays["0.k"]))
