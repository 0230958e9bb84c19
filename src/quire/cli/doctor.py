"""`quire doctor`: reports what this machine supports, and what is wrong."""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field
from rich.console import Console
from rich.table import Table

import quire
from quire.cli.model_options import ProcessorOptions
from quire.cli.settings import Command, TableOptions
from quire.cli.short_names import resolve
from quire.cli.values import Bytes, Flag, Folder, Model
from quire.core.errors import ModelError, QuireError
from quire.core.figures import context, size
from quire.demo import place

if TYPE_CHECKING:  # the command line loads no MLX
    from quire.attention.backend import AttentionBackend
    from quire.cli.models import Found

_SIGNS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "wrong": ("wrong", "red")}
_FEW_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check.

    Attributes:
        state: "ok", "note" if it works but could be better, or "wrong" if it does not work.
    """

    what: str
    state: Literal["ok", "note", "wrong"]
    text: str


class DoctorCommand(ProcessorOptions, TableOptions, Command):
    """Looks at the device, its memory, MLX, compiled kernels, attention, the disk tier and a model.
    Ends with status 1 if something is wrong.
    """

    command: ClassVar[str] = "doctor"
    summary: ClassVar[str] = "check this machine, and a model on it"

    model: Annotated[Model | None, Flag(positional=True)] = Field(
        None,
        description="a folder, a GGUF file, or the hub id or short name of a model on this disk; "
        "default: the embedded model",
    )
    program: bool = Field(False, description="print only the program that is traced from the model")
    kv_disk: Folder | None = Field(None, description="check this folder of `quire serve --kv-disk`")
    kv_disk_size: Bytes = Field(20 * 10**9, description="the size planned for that folder")

    def run(self) -> int:
        """Print the findings. Return 1 if something is wrong."""
        if self.program:
            print(_program(self.model))
            return 0
        logging.disable(logging.WARNING)  # what is logged at opening is said here
        try:
            findings = [*_machine(self), *_model(self.model)]
            if self.kv_disk is not None:
                findings.append(_disk(self.kv_disk.expanduser(), self.kv_disk_size))
        finally:
            logging.disable(logging.NOTSET)
        if self.as_json:
            print(json.dumps([asdict(finding) for finding in findings], indent=2))
        else:
            Console().print(_table(findings))
        return 1 if any(finding.state == "wrong" for finding in findings) else 0


def _program(model: str | None) -> str:
    """Return the programs of a model's steps and of its encoders as text.

    An encoder's program is for an item of one shape: that of a blank file.
    """
    from quire.device.device import open_device
    from quire.media.kinds import open_processors
    from quire.models.weights.loader import open_model
    from quire.program.pieces import at_once
    from quire.program.trace import trace, trace_encoder

    open_device("auto")
    loaded = open_model(place(model))
    programs = trace(loaded.model)
    texts = [str(programs.body), str(programs.head)]
    for kind, processor in open_processors(loaded.path, loaded.model.encoders).items():
        for shape in dict.fromkeys(each.item.shape for each in processor.example() or ()):
            title = f"encoder of {kind} items of shape {shape}"
            texts.append(f"{title}\n{at_once(trace_encoder(loaded.model, kind, shape))}")
    return "\n".join(texts)


def _table(findings: list[Finding]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        sign, colour = _SIGNS[finding.state]
        table.add_row(f"[{colour}]{sign}[/]", finding.what, finding.text)
    return table


def _machine(options: ProcessorOptions) -> Iterator[Finding]:
    python = f"Python {platform.python_version()}, {platform.platform(terse=True)}"
    yield Finding("quire", "ok", f"{quire.__version__}, {python}")
    try:
        import mlx.core  # noqa: F401  # whether it loads
    except ImportError as error:
        yield Finding("mlx", "wrong", f"does not load: {error}")
        return
    from quire.attention.registry import open_backends
    from quire.device.device import current_device, gpu_backends

    built = gpu_backends()
    yield Finding("mlx", "ok", f"{version('mlx')}, for {', '.join([*built, 'cpu'])}")
    device = current_device()
    yield Finding("device", "ok", device.name)
    free = device.free_memory()
    state: Literal["ok", "note"] = "note" if free < _FEW_BYTES else "ok"
    share = int(device.kv_share * free)
    yield Finding("memory", state, f"{size(free)} free; the KV cache would get {size(share)}")
    yield from _products(options)
    yield _attention(open_backends().all)


def _attention(backends: Sequence[AttentionBackend]) -> Finding:
    """Return the attention backends in order of preference. One that does not work here is passed
    over.
    """
    problems = {each.name: each.problem for each in backends}
    names = [name if why is None else f"{name} (off: {why})" for name, why in problems.items()]
    works = all(why is None for why in problems.values())
    return Finding("attention", "ok" if works else "note", ", then ".join(names))


def _products(options: ProcessorOptions) -> Iterator[Finding]:
    """Report the library that multiplies matrices, after choosing it as `quire serve` does."""
    from quire.device.blas import choose_blas
    from quire.device.cpu.kernels import NoKernels, load_kernels
    from quire.device.device import CPU, current_device

    device = current_device()
    if not isinstance(device, CPU):
        return
    instructions, threads = options.instructions(), options.threads or 0
    try:
        device.choose_products("auto", instructions, threads)
        kernels = load_kernels(threads, instructions, options.activation_bits)
    except NoKernels as error:
        yield Finding("kernels", "note", f"off: {error}")
    except ModelError as error:
        yield Finding("kernels", "wrong", str(error))
        return
    else:
        built = ", ".join(kernels.ops.instruction_sets())
        yield Finding("kernels", "ok", f"on: {kernels}; usable here: {built}")
        return
    if sys.platform == "linux":
        has = choose_blas("openblas")
        text = (
            "multiplies"
            if has
            else "not in use: pip install 'quire-serve[cpu]'; prefill is slow without it"
        )
        yield Finding("openblas", "ok" if has else "note", text)


def _look(name: str) -> Found:
    """Describe a model on this disk.

    Raises:
        QuireError: there is none of this name, or it cannot be read.
    """
    from quire.cli.models import in_hub_cache, inspect, inspect_gguf
    from quire.models.weights.gguf.folder import find_gguf

    path = Path(name).expanduser()
    if not path.exists():
        cached = in_hub_cache(name.partition(":")[0])
        if found := next((each for each in cached if each.name == name), None):
            return found
        raise ModelError("not on this disk; `quire models` lists the models that are")
    gguf = find_gguf(path)
    if gguf is None and not path.is_dir():
        raise ModelError("neither a folder nor a GGUF file")
    looked_at, look = (path, inspect) if gguf is None else (gguf, inspect_gguf)
    return look(looked_at, path.name, "folder")


def _model(name: str | None) -> Iterator[Finding]:
    model = place(name)
    try:
        model = resolve(model)
        found = _look(model)
    except (QuireError, OSError, ValueError) as error:
        said = str(error).removeprefix(f"{model}: ")
        yield Finding("model", "wrong", f"{model}: {said}")
        return
    if found.problem is not None:
        yield Finding("model", "wrong", f"{model}: {found.problem}")
        return
    from quire.device.device import current_device

    room = current_device().weight_memory()
    tokens = context(found.context or 0, found.trained)
    text = f"{found.family}, {size(found.weight_bytes)} of weights, context {tokens}"
    if found.weight_bytes > room:
        yield Finding("model", "wrong", f"{text}; only {size(room)} of memory are free")
    else:
        yield Finding("model", "ok", text)


def _disk(folder: Path, wanted: int) -> Finding:
    """Check whether a folder can hold the disk tier, without creating anything."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir():
        return Finding("disk tier", "wrong", f"{there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding("disk tier", "wrong", f"{there} is not writable")
    free = shutil.disk_usage(there).free
    if free < wanted:
        text = f"{size(free)} free on the disk, {size(wanted)} allowed: set --kv-disk-size"
        return Finding("disk tier", "note", text)
    return Finding("disk tier", "ok", f"{folder}: {size(free)} free")
