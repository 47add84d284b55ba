"""Encryption of what is kept where others may read or write: bytes, and names of objects.

A sealed object is a magic with a format number, a nonce, and the content encrypted with AES-256 in
Galois/Counter Mode, its tag at the end (NIST SP 800-38D). The name of the object is authenticated
with it, so an object that stands under another's name is refused like one that was altered. The
nonce is random, 96 bits (SP 800-38D, 8.2.2), so one key may seal 2**32 objects (8.3): at 2 MiB
each, 8 PiB. An object is sealed and opened in one piece, at most 2 GiB.

The keys, one for each purpose, are derived from the key file's (HKDF with SHA-256, RFC 5869). A
name is the HMAC-SHA256 of a key: nobody without the key file can tell what is stored. The name of
a file in the store's folder leads back to its key: it is the key, encrypted as one block of
AES-256. The index there is SQLCipher's; see `database`.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from ..errors import ConfigError, SealBroken

SEAL_MAGIC = b"kvp-seal\x01"
"""A magic, and the version of what follows."""
_NO_WAIT = os.O_NONBLOCK
"""Else opening a pipe would wait for its writer."""
_NONCE_BYTES = 12
_TAG_BYTES = 16
_KEY_BYTES = 32
SEAL_BYTES = len(SEAL_MAGIC) + _NONCE_BYTES + _TAG_BYTES
"""A sealed object is so much larger than its content."""


class Plain:
    """Objects and files as they are, named by their keys."""

    mark = ""
    """A store's folder keeps this mark of its key. The key cannot be derived from it."""
    index_key = ""
    """The key of the index, as SQLCipher takes it; empty for SQLite's own files."""

    def seal(self, data: bytes, name: bytes) -> bytes:
        return data

    def open(self, sealed: bytes, name: bytes) -> bytes:
        return sealed

    def name(self, key: bytes) -> str:
        return key.hex()

    def file_name(self, key: bytes) -> str:
        return key.hex()

    def key_of(self, file_name: str) -> bytes:
        return bytes.fromhex(file_name)


PLAIN = Plain()
Sealing = Plain
"""How objects and files are sealed and named: `PLAIN`, or a `Seal`."""


class Seal(Plain):
    """Seals and opens objects, and names them. Any thread may use it; both release the GIL.

    key: 32 bytes, of which the keys that are used are derived.
    Raises ConfigError where the package `cryptography` is not installed.
    """

    def __init__(self, key: bytes) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher
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
        self._file_names = Cipher(AES(derived(b"file name")), ECB())
        self._invalid = InvalidTag
        self.mark = self.name(b"store")
        self.index_key = f"x'{derived(b'index').hex()}'"

    def seal(self, data: bytes | bytearray | memoryview, name: bytes) -> bytes:
        """Return `data` sealed under a name: SEAL_BYTES longer. Sealed twice, it differs."""
        nonce = os.urandom(_NONCE_BYTES)
        return b"".join((SEAL_MAGIC, nonce, self._cipher.encrypt(nonce, data, SEAL_MAGIC + name)))

    def open(self, sealed: bytes | bytearray | memoryview, name: bytes) -> bytes:
        """Return what was sealed under this name.

        Raises SealBroken where the object was altered, cut off or sealed under another name, with
        another key, or by a version that is not known; nobody can tell which.
        """
        content = memoryview(sealed)
        start = len(SEAL_MAGIC) + _NONCE_BYTES
        if content[: len(SEAL_MAGIC)] != SEAL_MAGIC:
            raise SealBroken("it is no object of a known version of the seal")
        try:
            nonce = content[len(SEAL_MAGIC) : start]
            return bytes(self._cipher.decrypt(nonce, content[start:], SEAL_MAGIC + name))
        except (self._invalid, ValueError) as error:
            raise SealBroken(
                "it was altered, cut off or moved, or was sealed with another key"
            ) from error

    def name(self, key: bytes) -> str:
        """Return the name under which what has this key is kept: 64 hexadecimal digits."""
        return hmac.new(self._name_key, key, hashlib.sha256).hexdigest()

    def file_name(self, key: bytes) -> str:
        """Return the name of a file in the store's folder, by a key of 16 bytes: 32 digits."""
        return bytes(self._file_names.encryptor().update(key)).hex()

    def key_of(self, file_name: str) -> bytes:
        """Return the key that `file_name` made a name of."""
        return bytes(self._file_names.decryptor().update(bytes.fromhex(file_name)))


def read_key(path: Path) -> Seal:
    """Return the seal of a key file: 64 hexadecimal digits, for its owner alone.

    Raises ConfigError where it cannot be read, is anything else, or others may read it.
    """
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
        raise ConfigError(f"{path} is no regular file, so it is no key file; {make}")
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
            f"{path} is no key file: it must hold {2 * _KEY_BYTES} hexadecimal digits and no "
            "more; copy it again from where it was made"
        )
    return Seal(key)


def new_key(path: Path) -> None:
    """Make a key file, for its owner alone. Raises ConfigError where there is a file already."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError as error:
        raise ConfigError(
            f"{path} exists, and may be the only key of what was stored with it; choose another"
        ) from error
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{secrets.token_hex(_KEY_BYTES)}\n")
        file.flush()
        os.fsync(file.fileno())
