"""Times graphs by the card's clock."""

from __future__ import annotations

import ctypes
from functools import cache

from quire.device.cuda.driver import Graph, driver_call

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


def graph_microseconds(graph: Graph, times: int) -> float:
    """Return the mean time of a graph that is launched so many times, after a first one."""
    stream, begun, ended = _timeline()
    launch = "cuGraphLaunch", ctypes.c_void_p(graph.handle), stream
    driver_call(*launch)
    driver_call("cuEventRecord", begun, stream)
    for _ in range(times):
        driver_call(*launch)
    driver_call("cuEventRecord", ended, stream)
    driver_call("cuEventSynchronize", ended)
    milliseconds = ctypes.c_float()
    driver_call("cuEventElapsedTime", ctypes.byref(milliseconds), begun, ended)
    return milliseconds.value * 1e3 / times


@cache
def _timeline() -> tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]:
    """Return a stream that waits for no other, and two events."""
    stream, begun, ended = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    driver_call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
    for each in (begun, ended):
        driver_call("cuEventCreate", ctypes.byref(each), 0)
    return stream, begun, ended
