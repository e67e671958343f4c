"""Memory made resident ahead of its use: contents stay, and pages are there."""

import mmap
import struct
from pathlib import Path

import numpy as np
import pytest

from headway_engine.resident import make_resident

PAGES = 64
LARGE_BYTES = 64 << 20
PRESENT, SWAPPED = 1 << 63, 1 << 62


def backed_pages(address: int, count: int) -> int:
    """How many pages from `address` have memory behind them, or had it and were swapped out since: what else
    the machine does changes nothing about that. A page that was never written has neither."""
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        file.seek(address // mmap.PAGESIZE * 8)
        entries = struct.unpack(f"{count}Q", file.read(8 * count))
    return sum(1 for entry in entries if entry & (PRESENT | SWAPPED))


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="this system does not tell of pages")
def test_pages_are_there_and_keep_what_they_hold() -> None:
    """Asked of these very pages, and not of the process, whose memory moves for other reasons too."""
    with mmap.mmap(-1, LARGE_BYTES) as mapping:
        memory = np.frombuffer(mapping, dtype=np.uint8)
        address, count = memory.ctypes.data, LARGE_BYTES // mmap.PAGESIZE
        memory[7] = 9
        before = backed_pages(address, count)
        populated = make_resident([(address, LARGE_BYTES)], threads=2)
        after = backed_pages(address, count)
        kept = memory[7] == 9 and not memory[8:].any()
        del memory  # a mapping that is looked at cannot be closed
    if not populated:
        pytest.skip("this system cannot populate pages")
    assert before < count, "the pages were there before, so nothing was tested"
    assert after == count
    assert kept


def test_less_than_a_page_is_left_alone() -> None:
    memory = np.zeros(8, dtype=np.uint8)
    assert make_resident([(memory.ctypes.data, memory.nbytes)], threads=1)


def test_memory_that_is_not_ours_is_refused_and_nothing_breaks() -> None:
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE, prot=mmap.PROT_READ) as reading:
        address = np.frombuffer(reading, dtype=np.uint8).ctypes.data
        assert not make_resident([(address, PAGES * mmap.PAGESIZE)], threads=1)
