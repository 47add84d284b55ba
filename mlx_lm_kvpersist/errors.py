"""Every exception of the package.

KVPersistError
├── ConfigError                 an option or a combination of options is wrong
├── PluginNotFound              --plugin names something that is not installed
├── PluginFault                 a plugin gave a wrong answer, or broke a request (HTTP status 500)
├── UnsupportedVersion          this mlx-lm, or its pair with mlx, is not supported
├── PatchError                  a patch of the host could not be trusted
│   ├── TargetMissing           the thing to patch does not exist
│   ├── SignatureChanged        it exists, but looks different
│   └── PatchNotEffective       it was patched, and the server does not use it
├── SelfTestFailed              a check of `selftest` gave a wrong answer
├── ModelNotSupported           this model's cache cannot be kept
├── RequestRefused              a request cannot be served (its HTTP status: 400, or another)
├── GenerationStopped           the generation thread has ended (HTTP status 503)
│   └── DeviceFailed            the device computes nothing any more, and the server ends
├── ClientGone                  a client closed its connection before its reply had ended
├── NoAnswer                    a shared store does not answer in time
├── IndexDamaged                SQLite can read the index, and its content is wrong
└── StoreError
    ├── StoreFormatError        the store was written by another version
    ├── PoolFull                what must stay in RAM leaves no room for more
    └── BlockCorrupt            the file of a block is not what its name promises
        └── DecryptionFailed          what is encrypted was altered, moved, or has another key
"""

import sqlite3


class KVPersistError(Exception):
    """Base of every error this package raises."""


class ConfigError(KVPersistError):
    """An option, or a combination of options, is wrong."""


class PluginNotFound(KVPersistError):
    """`--plugin` names a plugin that is not installed."""


class PluginFault(KVPersistError):
    """A plugin answered a hook with what the server cannot use, or broke a request."""

    status = 500


class UnsupportedVersion(KVPersistError):
    """This mlx-lm, or this pair of mlx and mlx-lm, is not supported."""


class PatchError(KVPersistError):
    """A patch of the host could not be applied, or cannot be trusted."""


class TargetMissing(PatchError):
    """mlx-lm no longer has a function or class that we replace."""


class SignatureChanged(PatchError):
    """mlx-lm changed a function that we replace."""


class PatchNotEffective(PatchError):
    """A patch is in place, but the server does not see it."""


class SelfTestFailed(KVPersistError):
    """A check of `selftest` failed."""


class ModelNotSupported(KVPersistError):
    """A model's cache cannot be kept; it is served as the stock server does."""


class RequestRefused(KVPersistError, ValueError):
    """A request cannot be served; `status` is the HTTP status that its client gets.

    `code` is the name by which OpenAI's clients know a reason that they act upon, such as
    "context_length_exceeded".
    """

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class GenerationStopped(KVPersistError):
    """The generation thread has ended, and the server ends, too."""

    status = 503


class DeviceFailed(GenerationStopped):
    """The device computes nothing any more; only a new process can."""


class ClientGone(KVPersistError, ConnectionError):
    """The client closed its connection before its reply had ended."""


class NoAnswer(KVPersistError, OSError):
    """A shared store does not answer in time, such as a folder of a server that is gone."""


class IndexDamaged(KVPersistError, sqlite3.DatabaseError):
    """SQLite can read the index of a store, but its content cannot be right."""


class StoreError(KVPersistError):
    """The store on disk cannot be used."""


class StoreFormatError(StoreError):
    """The store was written by another version of this package."""


class PoolFull(StoreError):
    """The blocks that must stay in RAM for now leave no room for more."""


class BlockCorrupt(StoreError):
    """The file of a block or checkpoint is not what its name and metadata promise."""


class DecryptionFailed(BlockCorrupt):
    """Encrypted bytes were altered, cut off or moved, or were encrypted with another key."""
