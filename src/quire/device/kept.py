"""What was found out about kernels on this machine, kept from one start to the next.

Lies beside the kernels that MLX keeps compiled, so that both are lost together.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import mlx.core as mx

from quire.device.machine import device_model
from quire.device.private import kernel_folder

_SOURCES = {".py", ".cuh", ".h", ".cpp", ".so"}


class Claim(Enum):
    """What was found out. A value is part of keys on disk: a new meaning needs a new one."""

    COMPILED = "all that an engine needs is compiled"
    PRODUCTS_AGREE = "packed products agree"
    ATTENTION_AGREES = "attention agrees"
    CODING_AGREES = "coding agrees"
    DECODE_STEPS_AGREE = "decode steps agree"


@dataclass(frozen=True, slots=True)
class Fact:
    """A claim, and what it is made of.

    Attributes:
        subject: of frozen dataclasses, tuples, dtypes and JSON's plain values.
    """

    claim: Claim
    subject: object = None

    @property
    def key(self) -> str:
        """The same in every process for equal facts, another for any other.

        Raises:
            TypeError: the subject holds what has no such key.
        """
        return json.dumps([self.claim.value, _plain(self.subject)])


def _plain(value: object) -> object:
    """As JSON can tell it apart from all others."""
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


class Kept:
    """Facts, each an empty file named by its digest.

    Args:
        folder: that nobody else may write to; made when first needed. None keeps nothing.
        versions: of all that a fact depends on.
    """

    def __init__(self, folder: Path | None, versions: str) -> None:
        self._folder = folder
        self._versions = versions

    def holds(self, fact: Fact) -> bool:
        """Whether it was noted before."""
        path = self._path(fact)
        return path is not None and path.exists()

    def note(self, fact: Fact) -> None:
        """Keeps a fact. One that cannot be written is found out again at the next start."""
        path = self._path(fact)
        if path is None:
            return
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch()
        except OSError:
            return

    def _path(self, fact: Fact) -> Path | None:
        if self._folder is None:
            return None
        digest = hashlib.sha256(f"{self._versions}\n{fact.key}".encode())
        return self._folder / digest.hexdigest()[:32]


@cache
def kept() -> Kept:
    """Of this device, this MLX and these sources, in the process's private place."""
    folder = kernel_folder()
    if folder is None:
        return Kept(None, "")
    return Kept(folder / "kept", f"{device_model()} {version('mlx')} {_sources()}")


def _sources() -> str:
    digest = hashlib.sha256()
    package = Path(str(files("quire")))
    for path in sorted(package.rglob("*")):
        if path.suffix in _SOURCES:
            digest.update(path.relative_to(package).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
