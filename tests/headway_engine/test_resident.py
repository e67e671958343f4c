"""Memory made resident ahead of its use: contents stay, and pages are there."""

import mmap
import os

import numpy as np
import pytest

from headway_engine.resident import make_resident
from support.engine_server import resident_bytes

PAGES = 64


def test_pages_are_there_and_keep_what_they_hold() -> None:
    memory = np.zeros((64 << 20) + mmap.PAGESIZE, dtype=np.uint8)
    memory[7] = 9
    before = resident_bytes(os.getpid())
    if not make_resident([(memory.ctypes.data, memory.nbytes)], threads=2):
        pytest.skip("this system cannot populate pages")
    assert resident_bytes(os.getpid()) - before > 60 << 20
    assert memory[7] == 9
    assert not memory[8:].any()


def test_less_than_a_page_is_left_alone() -> None:
    memory = np.zeros(8, dtype=np.uint8)
    assert make_resident([(memory.ctypes.data, memory.nbytes)], threads=1)


def test_memory_that_is_not_ours_is_refused_and_nothing_breaks() -> None:
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE, prot=mmap.PROT_READ) as reading:
        address = np.frombuffer(reading, dtype=np.uint8).ctypes.data
        assert not make_resident([(address, PAGES * mmap.PAGESIZE)], threads=1)
