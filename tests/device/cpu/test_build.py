"""A source install compiles this processor's instruction set alone; wheels hold all of them."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess

import pytest

from quire.device.cpu.build import (
    FLAGS,
    SOURCES,
    CannotBuild,
    asked,
    build,
    chosen_units,
    instruction_sets,
    only,
    sets_of_this_processor,
    sets_that_run,
)


@pytest.mark.parametrize(
    ("machine", "features", "chain"),
    [
        ("x86_64", "sse2 ssse3", ["baseline"]),
        ("x86_64", "sse2 avx2 fma", ["avx2"]),
        ("x86_64", "avx2 avx_vnni", ["avxvnni", "avx2"]),
        ("x86_64", "avx2 avx512f", ["avx512"]),
        ("x86_64", "avx2 avx512f avx512_vnni amx_int8", ["amx", "vnni", "avx512"]),
        ("aarch64", "fp asimd", ["baseline"]),
        ("aarch64", "fp asimddp", ["dotprod", "baseline"]),
        ("aarch64", "fp asimddp i8mm", ["i8mm", "baseline"]),
        ("riscv64", "rv64", ["baseline"]),
    ],
)
def test_the_fastest_set_and_what_it_is_built_on(
    machine: str, features: str, chain: list[str]
) -> None:
    assert sets_of_this_processor(machine, features) == chain


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_only_the_named_sets_are_kept(machine: str) -> None:
    units = instruction_sets(machine)
    kept = only(["baseline"], units)
    assert [source.name for unit in kept for source in unit.sources] == ["isa_baseline.cpp"]
    assert only([unit.sources[0].stem.removeprefix("isa_") for unit in units], units) == units


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_sets_that_this_processor_lacks_are_valid() -> None:
    """An everyday build leaves them out. Their templates are instantiated, but not compiled."""
    run = only(sets_that_run(), instruction_sets())
    for unit in instruction_sets():
        if unit not in run:
            source = str(unit.sources[0])
            subprocess.run(["g++", *FLAGS, *unit.flags, "-fsyntax-only", source], check=True)


def test_a_build_compiles_the_fastest_set_unless_asked_for_more() -> None:
    assert chosen_units("") == only(sets_of_this_processor(), instruction_sets())
    assert chosen_units("all") == instruction_sets()
    quick = chosen_units("tests")
    assert [each.sources for each in quick] == [
        each.sources for each in only(sets_that_run(), instruction_sets())
    ]
    assert all({"-O0", "-O1"} & set(each.flags) for each in quick)


@pytest.mark.parametrize(
    ("variables", "choice"),
    [
        ({}, ""),
        ({"QUIRE_BUILD_KERNELS": "all"}, "all"),
        ({"QUIRE_KERNELS": "avx2"}, ""),
        ({"QUIRE_KERNELS": "all", "QUIRE_BUILD_KERNELS": "tests"}, "tests"),
    ],
)
def test_a_variable_of_its_own_chooses_what_is_built(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], choice: str
) -> None:
    _set(monkeypatch, variables)
    assert asked() == choice


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"QUIRE_BUILD_KERNELS": "avx2"}, "must be all, tests or off, not 'avx2'"),
        ({"QUIRE_KERNELS": "all"}, "set QUIRE_BUILD_KERNELS=all"),
        ({"QUIRE_KERNELS": "tests"}, "set QUIRE_BUILD_KERNELS=tests"),
    ],
)
def test_a_build_names_a_wrong_choice(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    _set(monkeypatch, variables)
    with pytest.raises(ValueError, match=said):
        asked()


def test_a_build_that_is_switched_off_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, {"QUIRE_BUILD_KERNELS": "off"})
    with pytest.raises(CannotBuild, match="QUIRE_BUILD_KERNELS=off"):
        build()


def _set(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in ("QUIRE_KERNELS", "QUIRE_BUILD_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


ONE_ROW = """
#include "few_by_tiles.h"
namespace quire::QUIRE_ISA {
void one_row(const Weight& w, const Rows& rows, int64_t column, const uint8_t* parts) {
    using Parts = PartSums<15, 2, true>;
    tiles_by_rows<64, 1, Nibbles<false>, Parts>(w, rows, column, 0, AllRows<1>{parts});
}
}
"""


FEW_ROWS = """
#include "kernels.h"
#include "simd.h"
#include "products.inc"
namespace quire::QUIRE_ISA {
template void few<BFloat16, ROWS, 4>(const Weight&, const BFloat16&, const Rows&, int64_t, int64_t);
}
"""


def _assembly(name: str, source: str) -> str:
    """Return the instructions of a source compiled for an instruction set of x86-64."""
    (unit,) = only([name], instruction_sets("x86_64"))
    command = ["g++", *FLAGS, *unit.flags, f"-I{SOURCES}", "-S", "-x", "c++", "-", "-o", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


needs_gxx = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64", reason="needs g++ for x86-64"
)


@needs_gxx
def test_a_row_fetches_each_line_of_codes_and_scales() -> None:
    """GCC drops calls of functions that only fetch, unless it inlines them first."""
    compiled = _assembly("avx2", ONE_ROW)
    lines = 64 * 16 // 2 // 64  # of a group's codes
    assert compiled.count("prefetcht0") == lines
    assert compiled.count("prefetcht1") > 0


@needs_gxx
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_few_rows_share_decoded_weights_and_keep_sums_in_registers(rows: int) -> None:
    compiled = _assembly("avx512", FEW_ROWS.replace("ROWS", str(rows)))
    blocks = 2  # a whole one, and the last one of a column
    assert compiled.count("vpslld\t$16") == 4 * blocks, "a shift for each of four columns"
    assert compiled.count("vfmadd") == 4 * 2 * rows * blocks
    stores = re.findall(r"vmov\w+\t%zmm\d+, \S*\(%r", compiled)
    assert len(stores) <= 2 * 4, "zeros to fill a last block, and no sum of the loop"
    assert compiled.count("prefetcht0") == 4, "a line of each column"
