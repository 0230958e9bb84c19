"""Quantises a model's matrices with MLX's quantiser, and writes it as a new folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from quire.core.errors import ModelError
from quire.core.folder import read_object
from quire.device.weights import Packing
from quire.models.draft_head import FILE as DRAFT_HEAD
from quire.models.registry import build
from quire.models.tokenizers.conversion import with_tokenizer
from quire.models.weights.files import Safetensors, find_weights
from quire.models.weights.hub import find_folder
from quire.models.weights.loader import checked_config
from quire.models.weights.names import Weights
from quire.models.weights.packing_plan import Choice, PackingPlan, plan_packing

_SHARD_BYTES = 4 << 30
_INDEX = "model.safetensors.index.json"
_COPIED = (".json", ".jinja", ".model", ".tiktoken", ".txt", ".md", ".py")
_PACKED_BY = ("quantization", "quantization_config", "compression_config")

StartStage = Callable[[str, int], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class Converted:
    """A folder that was written.

    Attributes:
        packed: number of quantised matrices.
        left: matrices that could not be quantised as requested, with the reason.
        bytes_before, bytes_after: total bytes of the tensors.
        bits: average bits per number of the quantised matrices, including scales and biases.
    """

    packed: int
    left: Mapping[str, str]
    bytes_before: int
    bytes_after: int
    bits: float


def check_output(out: Path) -> None:
    """Refuse an output folder that is not empty.

    Raises:
        ModelError: the path exists and is not an empty folder.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out}: exists and is not an empty folder; name another one")


def convert(
    source: str,
    out: Path,
    default: Packing,
    choices: Sequence[Choice],
    start_stage: StartStage,
) -> Converted:
    """Write a quantised copy of a model. On failure, nothing is left of it.

    Args:
        source: a folder or a hub id.
        choices: see `plan_packing`.

    Raises:
        ModelError: the output is not empty, the model cannot be read or is quantised already, or a
            choice matches no matrix.
    """
    check_output(out)
    folder = with_tokenizer(find_folder(source))
    plan = _planned(folder, default, choices)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed run
    try:
        partial.mkdir(parents=True)
        converted = _write_weights(partial, plan, start_stage)
        _copy_files(folder, partial)
        described = read_object(folder / "config.json") | _described(plan, default)
        (partial / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        partial.replace(out)
    except OSError as error:
        raise ModelError(f"{out}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return converted


def _planned(folder: Path, default: Packing, choices: Sequence[Choice]) -> PackingPlan:
    """Plan the quantisation of a folder's tensors, without reading them."""
    config = checked_config(folder)
    files = find_weights(folder)
    packed_by = next((key for key in _PACKED_BY if config.get(key)), None)
    if packed_by is not None or not isinstance(files, Safetensors):
        raise ModelError(
            f"{folder}: is quantised already ({packed_by or 'GGUF'}); name the original model"
        )
    read = files.read(config, dtype=None)
    if any(name.endswith(".scales") for name in read):
        raise ModelError(f"{folder}: is packed already (it holds scales); name its original")
    plan = plan_packing(build(config), read, default, choices=choices)
    if not plan.packings:
        raise ModelError(f"{folder}: no matrix is left to pack")
    return plan


def _write_weights(folder: Path, plan: PackingPlan, start_stage: StartStage) -> Converted:
    before = sum(array.nbytes for array in plan.weights.values())
    numbers = sum(plan.weights[name].size for name in plan.packings)
    remaining = dict(plan.weights)
    plan.weights.clear()  # each tensor is freed as soon as it is written
    shards = list(_shards(remaining, plan.packings))
    done = start_stage("packing", len(remaining))
    places: dict[str, str] = {}
    after = codes = 0
    for number, names in enumerate(shards, start=1):
        numbered = f"model-{number:05}-of-{len(shards):05}.safetensors"
        file = "model.safetensors" if len(shards) == 1 else numbered
        shard: Weights = {}
        for name in names:
            made = _packed(name, remaining.pop(name), plan.packings.get(name))
            mx.eval(list(made.values()))
            shard |= made
            if name in plan.packings:
                codes += sum(array.nbytes for array in made.values())
            done()
        mx.save_safetensors(str(folder / file), shard, metadata={"format": "mlx"})
        places |= dict.fromkeys(shard, file)
        after += sum(array.nbytes for array in shard.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": after}, "weight_map": dict(sorted(places.items()))}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return Converted(
        len(plan.packings), plan.left, before, bytes_after=after, bits=8 * codes / numbers
    )


def _shards(weights: Weights, packings: Mapping[str, Packing]) -> Iterator[list[str]]:
    """Split the names into files of about `_SHARD_BYTES`."""
    names: list[str] = []
    size = 0
    for name, array in weights.items():
        packing = packings.get(name)
        nbytes = array.nbytes if packing is None else array.size * (packing.bits + 1) // 8
        if names and size + nbytes > _SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    yield names


def _packed(name: str, array: mx.array, packing: Packing | None) -> Weights:
    """Return the tensors that replace one of the checkpoint's."""
    if packing is None:
        return {name: array}
    base = name.removesuffix(".weight")
    parts = mx.quantize(array, **asdict(packing))
    return dict(zip((name, f"{base}.scales", f"{base}.biases"), parts, strict=False))


def _described(plan: PackingPlan, default: Packing) -> dict[str, Any]:
    """Return the entries of `config.json` that mlx-lm and MLX-VLM read."""
    others = {
        module: asdict(packing)
        for name, packing in plan.packings.items()
        if packing != default
        for module in _module_names(name.removesuffix(".weight"))
    }
    return {"quantization": asdict(default) | others}


def _module_names(name: str) -> tuple[str, ...]:
    """Return a module's name in the checkpoint, and its name in MLX's libraries if that differs."""
    wrapped = "model.language_model."
    if not name.startswith(wrapped):
        return (name,)
    return name, f"language_model.model.{name.removeprefix(wrapped)}"


def _copy_files(source: Path, target: Path) -> None:
    """Copy the files beside the weights: tokenizer, templates, settings, a draft head."""
    for path in sorted(source.rglob("*")):
        inner = path.relative_to(source)
        hidden = any(part.startswith(".") for part in inner.parts)
        wanted = path.suffix in _COPIED or inner == DRAFT_HEAD
        if hidden or not wanted or not path.is_file() or str(inner) in ("config.json", _INDEX):
            continue
        (target / inner).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / inner)
