"""The kernel that codes full tails, emulated, against the format's own way."""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import pytest

from quire.cache.specs import FullKV
from quire.core.kv_format import KVFormat
from quire.engine.decode import kernels
from quire.engine.decode.sealing import seal_differs
from tests.support.emulated_cuda import emulate
from tests.support.emulated_metal import why_not


def _run(source: str, count: int, inputs: list[mx.array], arrays: list[mx.array]) -> None:
    header, _, rest = source.partition('extern "C"')
    body = rest[rest.index("{") + 1 : rest.rindex("}")]
    names = re.findall(r"(\w+)[,)]", rest[: rest.index("{")])[-6:]
    views = [each.view(mx.uint16) if each.dtype == mx.bfloat16 else each for each in arrays]
    mx.eval(views)
    table = np.array([np.asarray(memoryview(each)).ctypes.data for each in views], np.int64)
    emulate("seal", names, ["done"], body, header)(
        inputs=[*inputs, mx.array(table)],
        grid=(count * kernels.SEAL_THREADS, 1, 1),
        threadgroup=(kernels.SEAL_THREADS, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(("dim", "bits"), [(64, (8, 8)), (128, (4, 4)), (512, (8, 4))])
def test_full_tails_are_coded_as_the_format_codes_them(dim: int, bits: tuple[int, int]) -> None:
    assert seal_differs(FullKV(2, dim), KVFormat("page", *bits), _run) is None


@pytest.mark.slow
def test_tails_that_are_not_coded_are_seen() -> None:
    found = seal_differs(FullKV(2, 64), KVFormat("page", 4, 4), lambda *_: None)
    assert "relative error 1," in f"{found},"
