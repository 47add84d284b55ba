"""Drop files from the kernel's page cache, without root, and count the pages that stay."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path


def drop_cached_pages(paths: Sequence[Path]) -> float | None:
    """Return the share of the files' pages that are still cached afterwards.

    Returns None without files, and on systems that cannot drop pages (macOS).
    """
    if not hasattr(os, "posix_fadvise") or not paths:
        return None
    n_pages = n_left = 0
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not yet on the device cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            in_file, in_memory = _resident_pages(descriptor)
        finally:
            os.close(descriptor)
        n_pages += in_file
        n_left += in_memory
    return n_left / max(1, n_pages)


def _resident_pages(descriptor: int) -> tuple[int, int]:
    """Return the number of a file's pages, and the number that are in the page cache."""
    n_bytes = os.fstat(descriptor).st_size
    if not n_bytes:
        return 0, 0
    n_pages = -(-n_bytes // mmap.PAGESIZE)
    resident = (ctypes.c_ubyte * n_pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    address = libc.mmap(None, n_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    try:
        if libc.mincore(address, n_bytes, ctypes.byref(resident)):
            raise OSError(ctypes.get_errno(), "mincore")
    finally:
        libc.munmap(address, n_bytes)
    return n_pages, sum(flag & 1 for flag in resident)
