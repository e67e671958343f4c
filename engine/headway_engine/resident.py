"""Memory that the system gives at once and not when it is first written.

A process's zero pages cost nothing until they are touched, and then each costs a fault, and on a virtual
machine often a second one of the host. Whoever knows that memory will be written soon pays that ahead, when
nobody waits. Knows nothing of what the memory is for. Where the system cannot (Linux before 5.14), nothing
happens.
"""

import ctypes
import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

MADV_POPULATE_WRITE = 23
"""Linux's number; Python's mmap has it for memory of its own only."""


def make_resident(ranges: Sequence[tuple[int, int]], threads: int) -> bool:
    """Have the whole pages in these ranges (address, bytes) backed by memory, contents unchanged. Only memory
    of this process that may be written. False when the system cannot."""
    try:
        libc = ctypes.CDLL(None)
        advise = libc.madvise
    except (OSError, AttributeError):
        return False
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def one(span: tuple[int, int]) -> bool:
        first = -(-span[0] // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (span[0] + span[1]) // mmap.PAGESIZE * mmap.PAGESIZE
        return end <= first or advise(first, end - first, MADV_POPULATE_WRITE) == 0

    with ThreadPoolExecutor(max(1, threads)) as pool:
        return all(pool.map(one, ranges))
