"""Decode steps as recorded work: static memory for their numbers, sizes in buckets, padding rows that harm
nobody.

A step of few sequences is hundreds of small kernels, and launching them one by one takes longer than they
run. Recorded once for a bucket of sizes, they are replayed as one. What records is behind a Protocol: CUDA's
graphs, or for tests a recorder that only calls the work again. Knows nothing of models and requests.
"""

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from headway_engine.lean.kernels import Decodes
from headway_engine.logs import fields

log = logging.getLogger(__name__)

RECORDING_LIMIT_S = 60.0
"""How long recording may take at start; sizes that are left are computed without."""

_LEAST_WIDTH = 16
"""Blocks of the narrowest table that has a bucket of its own."""

_SAY_EVERY_S = 5.0


class Recorder(Protocol):
    """Turns work into something that can be done again without being launched piece by piece."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do the work at least once, and return what does it again on the same memory."""
        ...


class EagerRecorder:
    """Records nothing: doing it again is calling it again."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See Recorder."""
        work()
        return work


class CudaRecorder:
    """CUDA graphs that share one pool of memory, which is right since no two of them run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See Recorder. The work runs first on the stream it is recorded on: what libraries set up on their
        first call may not be part of a graph."""
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(2):
                    work()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads of the process may allocate meanwhile: that is no part of the graph.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        return graph.replay


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """Sizes that work is recorded for."""

    rows: int
    blocks: int  # width of the block tables

    def holds(self, rows: int, blocks: int) -> bool:
        """A step of these sizes can be padded to it."""
        return rows <= self.rows and blocks <= self.blocks


def row_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, 16, then by halves of powers of two: where padding costs anything, it is less than half."""
    sizes = [size for base in range(4) if (size := 1 << base) < most]
    base = 16
    while base < most:
        sizes.extend(size for size in (base, base + base // 2) if size < most)
        base *= 2
    return [*sizes, most]


def width_sizes(most: int) -> list[int]:
    """Powers of two of blocks, and the widest."""
    sizes = []
    size = _LEAST_WIDTH
    while size < most:
        sizes.append(size)
        size *= 2
    return [*sizes, most]


def buckets(
    most_rows: int, most_blocks: int, *, by_width: bool, most_cells: int | None = None
) -> list[Bucket]:
    """Those to record: the largest, whose memory serves all others, then from the smallest, which gain most.

    `by_width` for kernels that read whole tables; `most_cells` leaves out what has more rows times blocks.
    """
    widths = width_sizes(most_blocks) if by_width else [most_blocks]
    found = [Bucket(rows, blocks) for rows in row_sizes(most_rows) for blocks in widths]
    fitting = sorted(b for b in found if most_cells is None or b.rows * b.blocks <= most_cells)
    largest = max(fitting, key=_cells, default=None)
    return [*([largest] if largest else []), *(b for b in fitting if b != largest)]


def _cells(bucket: Bucket) -> tuple[int, int]:
    return bucket.rows * bucket.blocks, bucket.rows


class DecodeInputs:
    """Token, position and block table of each row, in memory that stays where it is.

    On the host, a row's table is written only where it differs from what the row said before: most sequences
    stand where they stood in the step before, and grew by a block at most.
    """

    def __init__(
        self, most_rows: int, most_blocks: int, block_tokens: int, scratch: int, device: torch.device
    ) -> None:
        """`scratch` is a block that nobody owns: padding rows write to it and read from it."""
        self._scratch = scratch
        self.block_tokens = block_tokens
        self._host = np.zeros((most_rows, 2 + most_blocks), dtype=np.int32)
        self._host[:, 2:] = scratch
        self._said: list[list[int]] = [[] for _ in range(most_rows)]
        self._device_rows = torch.from_numpy(self._host).to(device, copy=True)
        self._staging = torch.empty(self._host.size, dtype=torch.int32, pin_memory=device.type == "cuda")

    def fill(self, rows: Seq[tuple[int, int, Seq[int]]], bucket: Bucket, whole_width: bool) -> None:
        """Put (token, position, block table) of each row in, and padding below, and send it to the device.

        `whole_width`: the kernel reads every column of the bucket, so all must be of this step.
        """
        used_most = 1
        for row, (token, position, table) in enumerate(rows):
            used = position // self.block_tokens + 1
            used_most = max(used_most, used)
            self._write(row, token, position, table[:used])
        for row in range(len(rows), bucket.rows):
            self._write(row, 0, 0, [self._scratch])
        columns = 2 + (bucket.blocks if whole_width else used_most)
        packed = self._staging[: bucket.rows * columns].view(bucket.rows, columns)
        packed.numpy()[:] = self._host[: bucket.rows, :columns]
        # One copy of what is needed; waiting for it lets the next step write to the staging memory.
        self._device_rows[: bucket.rows, :columns] = packed.to(self._device_rows.device)

    def _write(self, row: int, token: int, position: int, table: Seq[int]) -> None:
        said, line = self._said[row], self._host[row]
        line[0], line[1] = token, position
        known = len(said)
        if known and known <= len(table) and table[:known] == said:
            if known == len(table):
                return
            line[2 + known : 2 + len(table)] = table[known:]
        else:
            line[2 : 2 + len(table)] = table
            line[2 + len(table) :] = table[0]  # its own: what is no number in one sequence stays there
        self._said[row] = list(table)

    def read(self, bucket: Bucket) -> "DecodeRows":
        """Views and sums of the static memory, computed on the device: recorded with what uses them."""
        cells = self._device_rows[: bucket.rows, : 2 + bucket.blocks]
        positions = cells[:, 1].long()
        tables = cells[:, 2:]
        own = (positions // self.block_tokens)[:, None]
        return DecodeRows(
            ids=cells[:, 0].long(),
            positions=positions,
            row_blocks=tables.gather(1, own)[:, 0].long(),
            row_offsets=positions % self.block_tokens,
            decodes=Decodes(tables, cells[:, 1] + 1, bucket.blocks * self.block_tokens),
        )


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """What a forward pass of decodes reads."""

    ids: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    row_blocks: torch.Tensor  # [rows] block that takes each token's keys and values
    row_offsets: torch.Tensor  # [rows] place inside that block
    decodes: Decodes


class DecodeGraphs:
    """Recorded decode steps: which sizes there are, and the replay of the one that fits."""

    def __init__(
        self,
        inputs: DecodeInputs,
        forward: Callable[[DecodeRows], torch.Tensor],
        out: torch.Tensor,  # [most rows, vocabulary]: where results are found
        *,
        whole_width: bool,
    ) -> None:
        self._inputs = inputs
        self._forward = forward
        self._out = out
        self._whole_width = whole_width
        self._recorded: dict[Bucket, Callable[[], None]] = {}

    @property
    def recorded(self) -> int:
        """Number of sizes that are there."""
        return len(self._recorded)

    def record(
        self,
        recorder: Recorder,
        wanted: Iterable[Bucket],
        *,
        limit_s: float = RECORDING_LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Record the wanted sizes until they are done or time is up. A size that cannot be recorded ends it:
        what is there is used, and the rest computed without."""
        sizes = list(wanted)
        began_s = said_s = clock()
        why: str | None = None
        for bucket in sizes:
            now_s = clock()
            if now_s - began_s > limit_s:
                why = f"not more than {limit_s:g} s are given to it"
                break
            if now_s - said_s > _SAY_EVERY_S:
                log.info(fields("recording-decode-graphs", recorded=self.recorded, of=len(sizes)))
                said_s = now_s
            try:
                self._inputs.fill([], bucket, self._whole_width)
                self._recorded[bucket] = recorder.record(self._work(bucket))
            except (RuntimeError, torch.OutOfMemoryError) as error:
                first, *_ = str(error).splitlines() or [""]
                why = f"{type(error).__name__}: {first[:200]}"
                break
        log.log(
            logging.WARNING if why else logging.INFO,
            fields(
                "decode-graphs",
                recorded=self.recorded,
                of=len(sizes),
                seconds=round(clock() - began_s, 1),
                why=why,
            ),
        )

    def replay(self, rows: Seq[tuple[int, int, Seq[int]]]) -> torch.Tensor | None:
        """Logits [rows, vocabulary] of decodes (token, position, block table), valid until the next replay;
        None when no recorded size holds them."""
        blocks = max(position for _, position, _ in rows) // self._inputs.block_tokens + 1
        fitting = [bucket for bucket in self._recorded if bucket.holds(len(rows), blocks)]
        if not fitting:
            return None
        bucket = min(fitting, key=_cells)
        self._inputs.fill(rows, bucket, self._whole_width)
        self._recorded[bucket]()
        return self._out[: len(rows)]

    def _work(self, bucket: Bucket) -> Callable[[], None]:
        def work() -> None:
            self._out[: bucket.rows] = self._forward(self._inputs.read(bucket))

        return work
