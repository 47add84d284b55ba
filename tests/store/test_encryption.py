"""Key files, and encrypted objects, which only their own name and key decrypt."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlx_lm_kvpersist.cli import main as cli
from mlx_lm_kvpersist.errors import ConfigError, DecryptionFailed
from mlx_lm_kvpersist.store.encryption import Cipher, read_key

CIPHER, OTHER = Cipher(bytes(32)), Cipher(bytes(31) + b"\1")
CONTENT = b"A prompt that nobody else may read. " * 100


@pytest.mark.parametrize("content", [b"", b"\0", CONTENT])
def test_decrypt_returns_the_encrypted_content(content: bytes) -> None:
    encrypted = CIPHER.encrypt(content, b"name")
    assert len(encrypted) == len(content) + CIPHER.n_added_bytes
    assert CIPHER.decrypt(memoryview(encrypted), b"name") == content
    assert encrypted != CIPHER.encrypt(content, b"name")
    assert CONTENT[:16] not in encrypted


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda encrypted: b"",
    "only magic": lambda encrypted: encrypted[:9],
    "no tag": lambda encrypted: encrypted[:25],
    "truncated": lambda encrypted: encrypted[:-1],
    "extra byte": lambda encrypted: encrypted + b"\0",
    "plaintext": lambda encrypted: CONTENT,
    "two ciphertexts mixed": lambda encrypted: (
        CIPHER.encrypt(CONTENT, b"name")[:200] + encrypted[200:]
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_modified_ciphertext_is_refused(change: Callable[[bytes], bytes]) -> None:
    with pytest.raises(DecryptionFailed):
        CIPHER.decrypt(change(CIPHER.encrypt(CONTENT, b"name")), b"name")


def test_flipped_bit_in_any_byte_is_refused() -> None:
    encrypted = CIPHER.encrypt(b"short", b"name")
    for position in range(len(encrypted)):
        changed = bytearray(encrypted)
        changed[position] ^= 1
        with pytest.raises(DecryptionFailed):
            CIPHER.decrypt(changed, b"name")


def test_decrypt_refuses_another_name_or_key() -> None:
    encrypted = CIPHER.encrypt(CONTENT, b"name")
    with pytest.raises(DecryptionFailed):
        CIPHER.decrypt(encrypted, b"other")
    with pytest.raises(DecryptionFailed):
        OTHER.decrypt(encrypted, b"name")


def test_object_names_are_32_byte_digests_that_depend_on_the_key() -> None:
    names = {CIPHER.object_name(b"a"), CIPHER.object_name(b"b"), OTHER.object_name(b"a")}
    assert len(names) == 3 and all(len(bytes.fromhex(name)) == 32 for name in names)
    assert CIPHER.object_name(b"a") == Cipher(bytes(32)).object_name(b"a")


def test_threads_can_share_a_cipher() -> None:
    def round_trip(number: int) -> bool:
        content = os.urandom(100_000)
        name = b"%d" % number
        return CIPHER.decrypt(CIPHER.encrypt(content, name), name) == content

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(round_trip, range(64)))


def test_key_command_makes_a_private_file_and_overwrites_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "team.key"
    assert cli.main(["key", str(path)]) == 0
    assert path.stat().st_mode & 0o777 == 0o600 and f"{path} is made" in capsys.readouterr().out
    encrypted = read_key(path).encrypt(CONTENT, b"name")
    assert read_key(path).decrypt(encrypted, b"name") == CONTENT
    before = path.read_bytes()
    assert cli.main(["key", str(path)]) == 1
    assert path.read_bytes() == before and "choose another" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "0" * 62, "0" * 65, "0" * 66, "x" * 64, "ü" * 64])
def test_key_file_with_invalid_content_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key"
    path.write_text(content, encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        read_key(path)


def test_pipe_or_device_as_key_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=r"is not a regular file.*mlx-lm-kvpersist key"):
            read_key(path)


def test_key_file_that_is_not_private_or_not_readable_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("0" * 64)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_key(path)
    with pytest.raises(ConfigError, match="mlx-lm-kvpersist key"):
        read_key(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key(tmp_path)


def test_missing_cryptography_package_is_reported_with_a_pip_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'mlx-lm-kvpersist\[encrypt\]'"):
        Cipher(bytes(32))
