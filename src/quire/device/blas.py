"""Matrix products on a Linux CPU: replaces the BLAS in MLX's wheel with OpenBLAS.

The wheel multiplies by netlib's reference BLAS, one element after the other: 6 GFLOP/s a core where
OpenBLAS does 70 to 150 (benchmarks/README.md). MLX has no setting for it, and NumPy's build of
OpenBLAS, the package `scipy-openblas32`, exports its functions under a prefix, so that the dynamic
linker would not take one for the other. What it does instead is done here for one symbol: the slot
through which libmlx.so calls `cblas_sgemm` (its entry in the global offset table) is pointed to
OpenBLAS's function, which has the same signature.

OpenBLAS chooses its inner loop by the shape of a product, so that a row's last bits may depend on
how many rows are beside it, as on a GPU. Its kernels for AVX-512 round alike unless sums are long
or the right matrix is transposed (`Device.times_transposed`), those for AVX2 do not. The reference
BLAS knows no such thing: `--blas mlx`.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import mlx.core as mx
import psutil

from quire.device.operations import UnfusedOperations
from quire.device.weights import DECODED_MODES, PackedWeight

log = logging.getLogger("quire.blas")

_SYMBOL = "cblas_sgemm"
_MOST_THREADS = 16
_TOLERANCE = 1e-4
_READ_WRITE = 3  # of mmap(2)


_replaced: dict[int, int] = {}
"""While OpenBLAS is replaced: the slot with its address, and the original address."""


_FEW = {3: 64, 5: 64, 6: 64}
"""By bits, most rows for which multiplying by codes is faster than unpacking them for OpenBLAS."""
_FEW_ELSE = 8


class OpenBLASOperations(UnfusedOperations):
    """MLX's, where it calls OpenBLAS: many rows are multiplied by unpacked codes."""

    def packed_linear(self, x: mx.array, weight: PackedWeight, bias: mx.array | None) -> mx.array:
        few = x.size // x.shape[-1] <= _FEW.get(weight.packing.bits, _FEW_ELSE)
        if few or weight.packing.mode in DECODED_MODES:
            return super().packed_linear(x, weight, bias)
        y = x @ weight.unpacked().astype(x.dtype).T
        return y if bias is None else y + bias


def choose_blas(name: str, threads: int = 0) -> bool:
    """Choose the library that computes MLX's products in this process.

    Args:
        name: "openblas", if it can be loaded, or "mlx" for MLX's own.
        threads: number of OpenBLAS's threads; 0 means half of the cores.

    Returns:
        Whether OpenBLAS multiplies.
    """
    while _replaced:
        mx.synchronize()
        _point(*_replaced.popitem())
    if name == "mlx" or sys.platform != "linux":
        return False
    if find_spec("scipy_openblas32") is None or find_spec("elftools") is None:
        log.warning(
            "OpenBLAS is not installed, so prefill is slow; run pip install 'quire-serve[cpu]'"
        )
        return False
    try:
        slot, function = _slot_of_mlx(), _function_of_openblas(threads)
        expected = _products(1.0)
        _replaced[slot] = _point(slot, function)
    except (OSError, LookupError, AttributeError, ValueError) as error:
        log.warning("OpenBLAS is disabled, MLX's slower BLAS multiplies matrices: %s", error)
        return False
    # Of the opposite sign, so that an output that nothing was written to is never taken for right.
    pairs = zip(expected, _products(-1.0), strict=True)
    if not all(mx.all(mx.abs(a + b) <= _TOLERANCE).item() for a, b in pairs):
        choose_blas("mlx")
        log.warning(
            "OpenBLAS is disabled, MLX's slower BLAS multiplies matrices: its products are "
            "wrong on this machine"
        )
        return False
    log.info("OpenBLAS multiplies matrices")
    return True


def _function_of_openblas(threads: int) -> int:
    """Return the address of OpenBLAS's cblas_sgemm. Loads the library when called first.

    By default half of the cores multiply, since its threads wait for work without sleeping: the
    other half belongs to the process that plans and serves. The variable is OpenBLAS's own, so that
    an operator may set another number.
    """
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(min(max(1, cores // 2), _MOST_THREADS)))
    import scipy_openblas32

    folder = Path(scipy_openblas32.get_lib_dir())
    library = ctypes.CDLL(str(folder / scipy_openblas32.get_library(fullname=True)))
    address = ctypes.cast(library[f"scipy_{_SYMBOL}"], ctypes.c_void_p).value
    assert address is not None  # a function that was found
    if threads:
        library["scipy_openblas_set_num_threads"](threads)
    return address


def _slot_of_mlx() -> int:
    """Return the address in libmlx.so of the pointer to the cblas_sgemm that it calls.

    Raises:
        LookupError: the library is not loaded from a file of its own, or calls no such function.
    """
    from elftools.elf.elffile import ELFFile
    from elftools.elf.relocation import RelocationSection
    from elftools.elf.sections import SymbolTableSection

    start, path = _loaded("libmlx.so")
    with path.open("rb") as file:
        for section in ELFFile(file).iter_sections():
            if not isinstance(section, RelocationSection) or not section.name.endswith(".plt"):
                continue
            names = section.elffile.get_section(section["sh_link"])
            assert isinstance(names, SymbolTableSection)
            for relocation in section.iter_relocations():
                if names.get_symbol(relocation["r_info_sym"]).name == _SYMBOL:
                    return start + int(relocation["r_offset"])
    raise LookupError(f"{path} does not call {_SYMBOL}")


def _loaded(name: str) -> tuple[int, Path]:
    """Return the base address of a loaded shared library, and its file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, offset, *_, path = line.split(maxsplit=5)
        if path.endswith(f"/{name}") and int(offset, 16) == 0:
            return int(addresses.partition("-")[0], 16), Path(path)
    raise LookupError(f"{name} is not loaded")


def _point(slot: int, function: int) -> int:
    """Has calls through `slot` go to `function`; the address that stood there before."""
    page = slot - slot % mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, _READ_WRITE) != 0:
        raise OSError(
            ctypes.get_errno(), "the memory page of MLX's call table cannot be made writable"
        )
    entry = ctypes.c_size_t.from_address(slot)
    before, entry.value = entry.value, function
    return before


def _products(sign: float) -> list[mx.array]:
    """Products with the right operand as it lies and transposed, of one row and of many."""
    left = sign * mx.sin(mx.arange(65 * 192, dtype=mx.float32)).reshape(65, 192)
    right = mx.cos(mx.arange(192 * 80, dtype=mx.float32)).reshape(192, 80)
    across = mx.contiguous(right.T).T
    products = [left @ right, left @ across, left[:1] @ right, left[:1] @ across]
    mx.eval(products)
    return products
