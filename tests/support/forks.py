"""Owns the preparation for cheap forks: a fork copies its parent's page table, and each page that it writes to."""

from __future__ import annotations

import atexit
import ctypes
import gc
from pathlib import Path

HUGE = 2**21
"""Bytes of a huge page. A process that has imported torch and transformers has 100,000 pages, or 200 huge pages."""
MADV_COLLAPSE = 25


def prepare() -> None:
    """Exclude all objects from later garbage collections, also in forks, and move memory to huge pages.

    A kernel without huge pages leaves the memory unchanged.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # triton and other libraries that nanobind binds print what was never freed
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, _, *name = line.split()
        if access == "rw-p" and name in ([], ["[heap]"]):
            start, stop = (int(address, 16) for address in addresses.split("-"))
            for page in range(-(-start // HUGE) * HUGE, stop - HUGE + 1, HUGE):
                madvise(ctypes.c_void_p(page), ctypes.c_size_t(HUGE), MADV_COLLAPSE)
