"""All exceptions of the package, each a KVPersistError, and a log for repeated failures."""

from __future__ import annotations

import errno
import logging
import math
import sqlite3
import time
from collections import Counter
from threading import Lock
from typing import Any

LOG_AGAIN_S = 3600.0
"""The seconds after which a kind of failure may be logged again."""
COUNTING = Lock()
"""Held only while counters of several threads are changed or read."""

_REMEDIES = {
    errno.EROFS: "mount the volume for writing, or choose another folder",
    errno.EACCES: "let this user write to the folder, or choose another folder",
    errno.EPERM: "let this user write to the folder, or choose another folder",
    errno.ENOSPC: "free space on the volume, or choose another folder",
    errno.EDQUOT: "free space on the volume, or choose another folder",
}


def remedy(error: Exception) -> str:
    """Return "; " and the remedy for a usual error of writing a file, otherwise ""."""
    advice = _REMEDIES.get(getattr(error, "errno", None) or 0)
    return f"; {advice}" if advice else ""


class KVPersistError(Exception):
    """Base of every error this package raises."""


class ConfigError(KVPersistError):
    """An option, or a combination of options, is wrong."""


class PluginNotFound(KVPersistError):
    """`--plugin` names a plugin that is not installed."""


class PluginFault(KVPersistError):
    """A plugin gave an answer that the server cannot use, or broke a request."""

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
    """A model's cache is not supported; the model is served as in the stock server."""


class RequestRefused(KVPersistError, ValueError):
    """A request cannot be served; `status` is the HTTP status that its client gets.

    `code` is OpenAI's name of a reason that clients act upon, such as "context_length_exceeded".
    """

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class GenerationStopped(KVPersistError):
    """The generation thread has ended, and the server ends, too."""

    status = 503


class DeviceFailed(GenerationStopped):
    """The device computes nothing any more; only a new process can use it again."""


class ClientGone(KVPersistError, ConnectionError):
    """The client closed its connection before its reply had ended."""


class NoAnswer(KVPersistError, OSError):
    """A shared store, such as a folder on a file server, does not answer in time."""


class IndexDamaged(KVPersistError, sqlite3.DatabaseError):
    """SQLite can read a store's index, but the index's content cannot be right."""


class StoreError(KVPersistError):
    """The store on disk cannot be used."""


class StoreFormatError(StoreError):
    """The store was written by another version of this package."""


class BlockCorrupt(StoreError):
    """The file of a block or checkpoint does not match its name or metadata."""


class DecryptionFailed(BlockCorrupt):
    """Encrypted bytes were altered, cut off or moved, or were encrypted with another key."""


class Failures:
    """Counts failures by kind, and logs the first of a kind, then at most one an hour. Any thread.

    The kind is the message without its values, unless `kind` is given. There must be few kinds.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self.counts: Counter[str] = Counter()
        self._logger = logger
        self._logged: dict[str, tuple[float, int]] = {}
        """When a kind was last logged, by the monotonic clock, and its count at that time."""

    def add(self, message: str, *args: object, kind: str = "", **how: Any) -> None:
        """Count a failure and log it, at DEBUG if its kind was logged within the last hour.

        `how` may have a `level` (WARNING by default), and other arguments of `Logger.log`.
        """
        kind, level = kind or message.replace("%s", "…"), how.pop("level", logging.WARNING)
        with COUNTING:
            self.counts[kind] += 1
            count, now_s = self.counts[kind], time.monotonic()
            logged_s, n_logged = self._logged.get(kind, (-math.inf, count - 1))
            if is_due := now_s >= logged_s + LOG_AGAIN_S:
                self._logged[kind] = now_s, count
        if is_due and count > n_logged + 1:
            message += f" ({count - n_logged - 1} more like this since the last such line)"
        level = level if is_due else logging.DEBUG
        self._logger.log(level, f"kvpersist: {message}", *args, stacklevel=2, **how)
