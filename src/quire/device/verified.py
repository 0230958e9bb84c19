"""Records which kernels were verified or chosen on this machine, across starts.

The records lie beside MLX's compiled kernels, so that both are lost together.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import mlx.core as mx

from quire.device.gpu_kernels import problem_of
from quire.device.machine import device_model
from quire.device.private import kernel_folder

_SOURCES = {".py", ".cuh", ".h", ".cpp", ".so"}


class Check(Enum):
    """A check that kernels passed, or a choice among them. Values are keys on disk: a new meaning
    needs a new value.
    """

    COMPILED = "all that an engine needs is compiled"
    PRODUCTS_AGREE = "packed products agree"
    ATTENTION_AGREES = "attention agrees"
    CODING_AGREES = "coding agrees"
    RECURRENCES_AGREE = "recurrences agree"
    DECODE_STEPS_AGREE = "decode steps agree"
    COMPILED_STEPS_AGREE = "compiled steps agree"
    QUICKEST_PROPOSAL = "quickest proposal"


@dataclass(frozen=True, slots=True)
class Verification:
    """A check, and the description of the checked kernels.

    Attributes:
        subject: frozen dataclasses, tuples, dtypes and JSON's plain values.
    """

    check: Check
    subject: object = None

    @property
    def key(self) -> str:
        """Return a text that is equal for equal verifications, in other processes too.

        Raises:
            TypeError: the subject holds a value that has no such text.
        """
        return json.dumps([self.check.value, _plain(self.subject)])


def relative_norm(found: mx.array, expected: mx.array) -> mx.array:
    """Return the norm of the difference, relative to that of `expected`; computed in float32."""
    wide = expected.astype(mx.float32)
    return mx.linalg.norm(found.astype(mx.float32) - wide) / mx.linalg.norm(wide)


def disagreement(found: mx.array, expected: mx.array, allowed: float) -> str | None:
    """Return how far a kernel's result is from the expected one; None if close enough.

    Args:
        allowed: largest `relative_norm`.
    """
    error = float(relative_norm(found, expected))
    # Written so that a NaN is too much.
    return None if error <= allowed else f"relative error {error:.2g}, allowed {allowed:.2g}"


def _plain(value: object) -> object:
    """Convert a value to JSON without giving two different values one form."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case mx.Dtype():
            return ["mx.Dtype", str(value)]
        case tuple():
            return ["tuple", *map(_plain, value)]
    if is_dataclass(value) and not isinstance(value, type):
        parts = [[field.name, _plain(getattr(value, field.name))] for field in fields(value)]
        return [type(value).__qualname__, *parts]
    raise TypeError(f"{value!r} has no key that is the same in every process")


class VerifiedKernels:
    """The verifications that succeeded, each a file named by its digest that holds a note.

    Args:
        folder: a folder that only this user may write to; made when first needed. None records
            nothing.
        versions: versions of everything that a verification depends on.
    """

    def __init__(self, folder: Path | None, versions: str) -> None:
        self._folder = folder
        self._versions = versions

    def holds(self, verification: Verification) -> bool:
        """Return whether the verification succeeded before."""
        path = self._path(verification)
        return path is not None and path.exists()

    def note(self, verification: Verification) -> str | None:
        """Return the note of a verification; None if it did not succeed before."""
        path = self._path(verification)
        try:
            return None if path is None else path.read_text()
        except OSError:
            return None

    def add(self, verification: Verification, note: str = "") -> None:
        """Record a success. If it cannot be written, the next start verifies again."""
        path = self._path(verification)
        if path is None:
            return
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_text(note)
        except OSError:
            return

    def _path(self, verification: Verification) -> Path | None:
        if self._folder is None:
            return None
        digest = hashlib.sha256(f"{self._versions}\n{verification.key}".encode())
        return self._folder / digest.hexdigest()[:32]


@cache
def verified_kernels() -> VerifiedKernels:
    """Return the records for this device, this MLX and these sources, in the private folder."""
    folder = kernel_folder()
    if folder is None:
        return VerifiedKernels(folder=None, versions="")
    versions = f"{device_model()} {version('mlx')} {_sources()}"
    return VerifiedKernels(folder / "verified", versions)


def problem_unless_verified(
    verification: Verification, check: Callable[[], str | None]
) -> str | None:
    """Return the problem that a check reports or raises; None if there is none, or if it passed
    at an earlier start. A success is recorded.
    """
    if verified_kernels().holds(verification):
        return None
    problem = problem_of(check)
    if problem is None:
        verified_kernels().add(verification)
    return problem


def kept_choice(verification: Verification, choose: Callable[[], int]) -> int:
    """Return the number that an earlier start chose, or else choose it now and record it."""
    known = verified_kernels().note(verification)
    if known is not None and known.isdecimal():
        return int(known)
    chosen = choose()
    verified_kernels().add(verification, str(chosen))
    return chosen


class SoundKernels:
    """Kinds of kernels, each checked at its first use. One that differs is not used.

    Args:
        log: gets a warning for a kind that differs.
        name: of the kernels, for the warning.
        instead: says in it what takes their place.

    Attributes:
        found: the problem of each kind that was checked; None where it agrees.
    """

    def __init__(self, log: logging.Logger, name: str, instead: str) -> None:
        self._log, self._name, self._instead = log, name, instead
        self.found: dict[Hashable, str | None] = {}

    def holds(
        self,
        kind: Hashable,
        check: Callable[[], str | None],
        verification: Verification | None = None,
    ) -> bool:
        """Return whether a kind agrees with what it replaces, as `problem` finds."""
        return self.problem(kind, check, verification) is None

    def problem(
        self,
        kind: Hashable,
        check: Callable[[], str | None],
        verification: Verification | None = None,
    ) -> str | None:
        """Return how a kind differs from what it replaces; None if it agrees.

        Args:
            check: returns the same, or raises.
            verification: under which a success is kept for other starts; None keeps none.
        """
        if kind not in self.found:
            if verification is None:
                problem = problem_of(check)
            else:
                problem = problem_unless_verified(verification, check)
            if problem is not None:
                named = self._name, kind, self._instead, problem
                self._log.warning("%s disabled for %s, %s: %s", *named)
            self.found[kind] = problem
        return self.found[kind]


def _sources() -> str:
    digest = hashlib.sha256()
    package = Path(str(files("quire")))
    for path in sorted(package.rglob("*")):
        if path.suffix in _SOURCES:
            digest.update(path.relative_to(package).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
