"""Encrypted objects: decrypted with their own name and key only; and key files."""

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
def test_what_is_encrypted_can_be_decrypted(content: bytes) -> None:
    encrypted = CIPHER.encrypt(content, b"name")
    assert len(encrypted) == len(content) + CIPHER.n_added_bytes
    assert CIPHER.decrypt(memoryview(encrypted), b"name") == content
    assert encrypted != CIPHER.encrypt(content, b"name")
    assert CONTENT[:16] not in encrypted


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda encrypted: b"",
    "magic alone": lambda encrypted: encrypted[:9],
    "no tag": lambda encrypted: encrypted[:25],
    "cut off": lambda encrypted: encrypted[:-1],
    "longer": lambda encrypted: encrypted + b"\0",
    "plain": lambda encrypted: CONTENT,
    "parts of two": lambda encrypted: CIPHER.encrypt(CONTENT, b"name")[:200] + encrypted[200:],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_was_changed_is_refused(change: Callable[[bytes], bytes]) -> None:
    with pytest.raises(DecryptionFailed):
        CIPHER.decrypt(change(CIPHER.encrypt(CONTENT, b"name")), b"name")


def test_a_flipped_bit_anywhere_is_found() -> None:
    encrypted = CIPHER.encrypt(b"short", b"name")
    for at in range(len(encrypted)):
        changed = bytearray(encrypted)
        changed[at] ^= 1
        with pytest.raises(DecryptionFailed):
            CIPHER.decrypt(changed, b"name")


def test_another_name_or_key_opens_nothing() -> None:
    encrypted = CIPHER.encrypt(CONTENT, b"name")
    with pytest.raises(DecryptionFailed):
        CIPHER.decrypt(encrypted, b"other")
    with pytest.raises(DecryptionFailed):
        OTHER.decrypt(encrypted, b"name")


def test_names_depend_on_the_key_file_and_say_nothing() -> None:
    names = {CIPHER.object_name(b"a"), CIPHER.object_name(b"b"), OTHER.object_name(b"a")}
    assert len(names) == 3 and all(len(bytes.fromhex(name)) == 32 for name in names)
    assert CIPHER.object_name(b"a") == Cipher(bytes(32)).object_name(b"a")


def test_threads_share_a_cipher() -> None:
    def both(number: int) -> bool:
        content = os.urandom(100_000)
        name = b"%d" % number
        return CIPHER.decrypt(CIPHER.encrypt(content, name), name) == content

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(both, range(64)))


def test_a_key_file_is_made_once_for_its_owner_alone(
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
def test_another_file_is_no_key(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key"
    path.write_text(content, encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        read_key(path)


def test_a_pipe_or_a_device_is_no_key_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=r"is not a regular file.*mlx-lm-kvpersist key"):
            read_key(path)


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("0" * 64)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_key(path)
    with pytest.raises(ConfigError, match="mlx-lm-kvpersist key"):
        read_key(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key(tmp_path)


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'mlx-lm-kvpersist\[encrypt\]'"):
        Cipher(bytes(32))
