"""Device memory of each rank that the other ranks of the machine write to.

A process opens the other ranks' memory by CUDA's handles for other processes, which holds for cards
that the process does not see otherwise. `exchange.cuh` and `rounds.cuh` say what is in an inbox.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from quire.device.cuda.driver import DriverError, driver_call
from quire.device.gpu_kernels import in_device_memory
from quire.device.ranks import Part, agreed, collectives

MOST_BLOCKS = 128
"""Most thread blocks of an exchange: about as many as a large card has multiprocessors."""
THREADS, PIECES = 256, 4
"""Threads of a block, and the most pieces that each sends before it waits for the others'."""
SLOT = 16 * THREADS * PIECES
"""Bytes of what a thread block sends at once."""
MOST_RANKS = 8
COUNTS = 4 * MOST_BLOCKS
"""Offset of two numbers of sums of few rows: the rounds that are over, and the thread blocks that
are done with this one. The numbers of rounds of exchanges lie before them.
"""
SLOTS = COUNTS + 16
"""Offset of the first slot of exchanges in an inbox, in bytes."""
SUM_SLOT = 1 << 20
"""Bytes of a rank's rows in a sum of few rows, of which every other 4 bytes number the round."""
_HANDLE = 64
_OPEN_WHEN_USED = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("bytes", ctypes.c_ubyte * _HANDLE),)


@dataclass(frozen=True, eq=False)
class Inboxes:
    """The inboxes of all ranks.

    Attributes:
        addresses: of each rank's inbox, as this process reaches it.
        table: the same as an array in device memory.
    """

    part: Part
    addresses: tuple[int, ...]
    table: mx.array = field(init=False)

    def __post_init__(self) -> None:
        table = in_device_memory(mx.array(np.array(self.addresses, np.int64)))
        mx.eval(table)
        object.__setattr__(self, "table", table)


def sum_slots(ranks: int) -> int:
    """Return the offset of the slots of sums of few rows, behind those of exchanges."""
    return SLOTS + 2 * ranks * MOST_BLOCKS * SLOT


def inbox_bytes(ranks: int) -> int:
    """Return the size of an inbox: two slots of each rank, for exchanges and for sums."""
    return sum_slots(ranks) + 2 * ranks * SUM_SLOT


def open_inboxes(part: Part) -> Inboxes:
    """Allocate this rank's inbox, and open the others'. All ranks call it at the same point.

    Raises:
        DriverError: some rank cannot open the memory of another.
    """
    if part.size > MOST_RANKS:
        raise DriverError(f"{part.size} ranks share memory; at most {MOST_RANKS} can")
    own, handle, problem = 0, _Handle(), ""
    try:
        own = _allocated(inbox_bytes(part.size))
        driver_call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(own))
    except DriverError as error:
        problem = str(error)
    sent = mx.array(np.frombuffer(bytes(handle.bytes), np.uint8))
    handles = np.array(collectives().gathered(sent)).reshape(part.size, _HANDLE)
    addresses = []
    for rank, each in enumerate(handles):
        try:
            addresses.append(own if rank == part.rank else _opened(each.tobytes()))
        except DriverError as error:
            problem = problem or f"the memory of rank {rank}: {error}"
    if not agreed(int(not problem), part):
        raise DriverError(problem or "another rank cannot open the memory of this one")
    return Inboxes(part, tuple(addresses))


def _allocated(size: int) -> int:
    """Return the address of new device memory, all zeros, which lives as long as the process."""
    address = ctypes.c_uint64()
    driver_call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    driver_call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(size))
    driver_call("cuCtxSynchronize")
    return address.value


def _opened(handle: bytes) -> int:
    address = ctypes.c_uint64()
    given = _Handle((ctypes.c_ubyte * _HANDLE).from_buffer_copy(handle))
    driver_call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, _OPEN_WHEN_USED)
    return address.value
