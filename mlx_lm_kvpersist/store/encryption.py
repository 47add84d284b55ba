"""Encryption of stored content, names, and the index.

An encrypted object is a magic with a format number, a nonce, and the content encrypted with AES-256
in Galois/Counter Mode, with the tag at the end (NIST SP 800-38D). The tag also authenticates the
object's name. The nonce is random, 96 bits (section 8.2.2), so one key may encrypt 2**32 objects
(8.3). An object is encrypted and decrypted in one piece, at most 2 GiB.

One key for each purpose is derived from the key in the key file (HKDF with SHA-256, RFC 5869).
Blocks, checkpoints and conversations have keys of another kind, which are hashes (`block_key`). An
object in a shared store is named by the HMAC-SHA256 of this hash. A file in a store's folder is
named by this hash, encrypted as one block of AES-256. SQLCipher encrypts every page of the index
and its log with AES-256, and authenticates it (https://www.zetetic.net/sqlcipher/design).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import sqlite3
import stat
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DecryptionFailed
from .folder import MAGIC, Plain, flush_to_device

_NO_WAIT = os.O_NONBLOCK  # otherwise opening a pipe would wait for its writer
_NONCE_BYTES = 12
_TAG_BYTES = 16
_KEY_BYTES = 32


class Cipher(Plain):
    """Encrypts and decrypts objects, and names them. Any thread may use it. It releases the GIL.

    key: 32 bytes. Raises ConfigError if the package `cryptography` is not installed.
    """

    n_added_bytes = len(MAGIC) + _NONCE_BYTES + _TAG_BYTES

    def __init__(self, key: bytes) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher as BlockCipher
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            from cryptography.hazmat.primitives.ciphers.algorithms import AES
            from cryptography.hazmat.primitives.ciphers.modes import ECB
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ImportError as error:
            raise ConfigError(
                "encryption needs the package cryptography: pip install 'mlx-lm-kvpersist[encrypt]'"
            ) from error

        def derived(purpose: bytes) -> bytes:
            info = b"mlx-lm-kvpersist " + purpose
            return bytes(HKDF(SHA256(), _KEY_BYTES, salt=None, info=info).derive(key))

        self._cipher = AESGCM(derived(b"content"))
        self._name_key = derived(b"name")
        self._file_names = BlockCipher(AES(derived(b"file name")), ECB())
        self._invalid = InvalidTag
        self.mark = self.object_name(b"store")
        self._index_key = f"x'{derived(b'index').hex()}'"

    def encrypt(self, content: bytes | bytearray | memoryview, name: bytes) -> bytes:
        """Return `content` encrypted under a name. Each call gives different bytes."""
        nonce = os.urandom(_NONCE_BYTES)
        return b"".join((MAGIC, nonce, self._cipher.encrypt(nonce, content, MAGIC + name)))

    def decrypt(self, encrypted: bytes | bytearray | memoryview, name: bytes) -> bytes:
        """Return the content that was encrypted under this name.

        Raises DecryptionFailed if it was altered or cut off, or if name, key or version differ.
        """
        content = memoryview(encrypted)
        start = len(MAGIC) + _NONCE_BYTES
        if content[: len(MAGIC)] != MAGIC:
            raise DecryptionFailed("it is not an encrypted object of a known version")
        try:
            nonce = content[len(MAGIC) : start]
            return bytes(self._cipher.decrypt(nonce, content[start:], MAGIC + name))
        except (self._invalid, ValueError) as error:
            raise DecryptionFailed(
                "it was altered, cut off or moved, or was encrypted with another key"
            ) from error

    def object_name(self, key: bytes) -> str:
        return hmac.new(self._name_key, key, hashlib.sha256).hexdigest()

    def file_name(self, key: bytes) -> str:
        """Return a file's name, 32 hex digits, for a record's key."""
        return bytes(self._file_names.encryptor().update(key)).hex()

    def key_of(self, file_name: str) -> bytes:
        return bytes(self._file_names.decryptor().update(bytes.fromhex(file_name)))

    def connect(self, path: Path, driver: Any = None) -> sqlite3.Connection:
        db = super().connect(path, driver or sqlcipher())
        db.execute("PRAGMA cipher_log_level = NONE")  # SQLCipher would write to stderr
        db.execute(f'PRAGMA key = "{self._index_key}"')
        return db


def sqlcipher() -> Any:
    """Return the driver of encrypted databases. Raises ConfigError if it is not installed."""
    try:
        from sqlcipher3 import dbapi2
    except ImportError as error:
        raise ConfigError(
            "an encrypted store needs the package sqlcipher3: "
            "pip install 'mlx-lm-kvpersist[encrypt]'"
        ) from error
    # Code that catches errors of sqlite3 must catch the same errors of SQLCipher.
    for name, kind in vars(dbapi2).items():
        if isinstance(kind, type) and issubclass(kind, dbapi2.Error) and kind is not dbapi2.Error:
            if not issubclass(kind, same := getattr(sqlite3, name)):
                kind.__bases__ = (*kind.__bases__, same)
    return dbapi2


def read_key(path: Path) -> Cipher:
    """Return the cipher of a key file: 64 hexadecimal digits, private. Raises ConfigError."""
    make = f"make one with: mlx-lm-kvpersist key {path}"
    try:
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | _NO_WAIT)) as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(2 * _KEY_BYTES + 3) if stat.S_ISREG(mode) else b""
    except FileNotFoundError as error:
        raise ConfigError(f"there is no key file {path}; {make}") from error
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path} is not a regular file, so it cannot be a key file; {make}")
    if mode & 0o077:
        raise ConfigError(
            f"others may read the key file {path} (mode {mode & 0o777:o}); run: chmod 600 {path}"
        )
    try:
        key = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise ConfigError(
            f"{path} is not a key file: it must hold {2 * _KEY_BYTES} hexadecimal digits and no "
            "more; copy it again from where it was made"
        )
    return Cipher(key)


def new_key(path: Path) -> None:
    """Make a key file that only its owner may read. Raises ConfigError if the file exists."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError as error:
        raise ConfigError(
            f"{path} exists, and may be the only key of a store; choose another file"
        ) from error
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{secrets.token_hex(_KEY_BYTES)}\n")
        file.flush()
        flush_to_device(file.fileno())
