"""`quire models`: lists the models on this disk, and which of them Quire can serve."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field
from rich.console import Console, Group, RenderableType
from rich.text import Text

from quire.cli.fitting import FittingTable
from quire.cli.settings import Command, TableOptions
from quire.cli.values import Paths
from quire.core import figures
from quire.core.errors import ModelError
from quire.core.figures import size
from quire.core.folder import read_object
from quire.demo import MODEL_DIR, NAME

_SIDE_TENSORS = (
    ".scales",
    ".biases",
    ".qzeros",
    ".g_idx",
)  # of packed weights; they are no parameters


@dataclass(frozen=True, slots=True)
class Found:
    """One model on this disk.

    Attributes:
        name: argument of `quire serve`: a hub id or a path; "" for the embedded model.
        where: "embedded", "hub cache" or "folder".
        parameters: number of parameters; packed weights are counted unpacked.
        weight_bytes: size of the weight files.
        quantization: e.g. "4 bits, group 64", or "" for plain weights.
        context: the most tokens of prompt and answer together, by `config.json`.
        trained: the most tokens that it was trained on, if `config.json` says.
        problem: why Quire cannot serve it, or None.
    """

    name: str
    where: str
    path: str
    family: str = ""
    parameters: int = 0
    weight_bytes: int = 0
    quantization: str = ""
    context: int | None = None
    trained: int | None = None
    problem: str | None = None


def inspect(folder: Path, name: str, where: str) -> Found:
    """Describe a model folder from its configuration and its tensors' headers."""
    # Imported late, since they load MLX: `quire --help` need not wait for it.
    from quire.models.registry import build
    from quire.models.tokenizers.conversion import tokenizer_of
    from quire.models.weights.gptq_awq import read_method
    from quire.models.weights.loader import context_length, trained_length
    from quire.models.weights.quantization import check_config, foreign_method, packed_otherwise
    from quire.models.weights.safetensors import find_shards, read_header

    config: dict[str, Any] = {}
    parameters = size = 0
    problem = context = trained = None
    quantization = ""
    try:
        config = _read_config(folder)
        check_config(config)
        quantization = _packing(config)
        packing = config.get("quantization") or config.get("quantization_config") or {}
        bits, method = packing.get("bits"), foreign_method(config)
        for shard in find_shards(folder):
            size += shard.stat().st_size
            header = json.loads(read_header(shard))
            parameters += _count(header, bits)
            if any(name.endswith(".qweight") for name in header):
                read_method(config)
            if packed_otherwise(header, method):
                raise ModelError(f"quantization method {method!r} is not supported")
        build(config)
        context, trained = context_length(config), trained_length(config)
        if tokenizer_of(folder) is None:
            raise ModelError("there is no tokenizer.json, nor another supported tokenizer")
    except ModelError as error:
        problem = str(error).removeprefix(f"{folder}: ")
    return Found(
        name=name,
        where=where,
        path=str(folder),
        family=str(config.get("model_type", "")),
        parameters=parameters,
        weight_bytes=size,
        quantization=quantization,
        context=context,
        trained=trained,
        problem=problem,
    )


def inspect_gguf(file: Path, name: str, where: str) -> Found:
    """Describe a GGUF file and its parts from its header."""
    from quire.models.registry import build
    from quire.models.weights.gguf.architectures import config_of
    from quire.models.weights.gguf.file import GGUF, read_gguf
    from quire.models.weights.gguf.tokenizer import tokenizer_files
    from quire.models.weights.loader import context_length, trained_length

    gguf: GGUF | None = None
    config: dict[str, Any] = {}
    problem = context = trained = None
    try:
        gguf = read_gguf(file)
        config = config_of(gguf)
        build(config)
        context, trained = context_length(config), trained_length(config)
        tokenizer_files(gguf)
    except ModelError as error:
        problem = str(error).removeprefix(f"{file}: ")
    tensors = list(gguf.tensors.values()) if gguf else []
    largest = max(tensors, key=lambda tensor: tensor.nbytes, default=None)
    return Found(
        name=name,
        where=where,
        path=str(file),
        family=str(config.get("model_type", gguf.architecture if gguf else "")),
        parameters=sum(prod(tensor.shape) for tensor in tensors),
        weight_bytes=sum(part.stat().st_size for part in gguf.files) if gguf else 0,
        quantization=f"GGUF {largest.kind.name}" if largest else "GGUF",
        context=context,
        trained=trained,
        problem=problem,
    )


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        raise ModelError("no config.json")
    return read_object(folder / "config.json")


def _count(header: dict[str, Any], bits: Any) -> int:
    """Return the parameters of one file. Each code of a packed weight counts."""
    packed = {name.removesuffix(".scales") for name in header if name.endswith(".scales")}
    total = 0
    for name, entry in header.items():
        if name == "__metadata__" or name.endswith(_SIDE_TENSORS):
            continue
        elements = prod(entry["shape"])
        codes = entry["dtype"] == "U32" and name.removesuffix(".weight") in packed
        if isinstance(bits, int) and bits > 0 and (codes or name.endswith(".qweight")):
            elements = elements * 32 // bits
        total += elements
    return total


def _packing(config: dict[str, Any]) -> str:
    packing = config.get("quantization")
    if packing:
        mode = packing.get("mode", "affine")
        words = [f"{packing.get('bits')} bits", f"group {packing.get('group_size')}"]
        return ", ".join(words if mode == "affine" else [mode])
    foreign = config.get("quantization_config") or {}
    return str(foreign.get("quant_method", ""))


def in_hub_cache(wanted: str | None = None) -> Iterator[Found]:
    """Return the models in the Hugging Face cache: the newest snapshot of each repository.

    Args:
        wanted: the only repository to look at.
    """
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    from quire.models.weights.gguf.folder import is_model

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda one: one.repo_id):
        if repository.repo_type != "model" or not repository.revisions:
            continue
        if wanted not in (None, repository.repo_id):
            continue
        newest = max(repository.revisions, key=lambda one: one.last_modified)
        names = {file.file_name for file in newest.files}
        # Tokenizers and datasets are cached alike; what has neither part is no model at all.
        files = [file.file_path for file in newest.files if file.file_name.endswith(".gguf")]
        if any(name.endswith(".safetensors") for name in names):
            yield inspect(newest.snapshot_path, repository.repo_id, "hub cache")
        elif models := sorted(file for file in files if is_model(file)):
            for file in models:
                inside = file.relative_to(newest.snapshot_path)
                yield inspect_gguf(file, f"{repository.repo_id}:{inside}", "hub cache")
        elif "config.json" in names:
            yield inspect(newest.snapshot_path, repository.repo_id, "hub cache")


def in_folder(root: Path) -> Iterator[Found]:
    """Return the folder if it is a model, else models one or two levels below, including GGUF
    files.

    Raises:
        ModelError: there is no such folder.
    """
    from quire.models.weights.gguf.folder import is_model

    if not root.is_dir():
        raise ModelError(f"--dir {root}: no such folder")
    configs = [root / "config.json"] if (root / "config.json").is_file() else []
    for config in configs or sorted([*root.glob("*/config.json"), *root.glob("*/*/config.json")]):
        yield inspect(config.parent, str(config.parent), "folder")
    for file in sorted([*root.glob("*.gguf"), *root.glob("*/*.gguf"), *root.glob("*/*/*.gguf")]):
        if is_model(file):
            yield inspect_gguf(file, str(file), "folder")


def find_models(folders: list[Path]) -> list[Found]:
    """Return the embedded model, then those of the hub cache and of the folders."""
    found = [inspect(MODEL_DIR, NAME, "embedded")] if (MODEL_DIR / "config.json").is_file() else []
    found += in_hub_cache()
    for folder in folders:
        found += in_folder(folder)
    return found


def _counted(number: int) -> str:
    """Return a count in short form, e.g. `4.5B`."""
    value = float(number)
    for unit in " KMB":
        if value < 1000:
            return f"{value:.3g}{unit}".strip()
        value /= 1000
    return f"{value:,.3g}T"


def with_problems(table: RenderableType, problems: Mapping[str, str]) -> Group:
    """Return a table with each model's problems below it, wrapped to the terminal's width."""
    said = [f"{name}: {problem}" for name, problem in problems.items()]
    return Group(table, *(Text(line, style="red") for line in said))


def listing(models: list[Found]) -> Group:
    """Return the models for the terminal, and why some are not served."""
    problems = {each.name: f"not served: {each.problem}" for each in models if each.problem}
    return with_problems(_table(models), problems)


def _table(models: list[Found]) -> FittingTable:
    headings = ("model", "family", "packed", "parameters", "on disk", "context")
    rows = [
        (
            model.name,
            model.family,
            model.quantization or "-",
            _counted(model.parameters) if model.parameters else "-",
            size(model.weight_bytes) if model.weight_bytes else "-",
            figures.context(model.context, model.trained) if model.context else "-",
        )
        for model in models
    ]
    return FittingTable(headings, rows, texts=3)


class ModelsCommand(TableOptions, Command):
    """Lists the embedded model, the Hugging Face cache, and the folders named, with what Quire can
    serve and, where it cannot, why not. Nothing is loaded or downloaded.
    """

    command: ClassVar[str] = "models"
    summary: ClassVar[str] = "list the models on this disk"

    dir: Paths = Field((), description="also list the models in this folder; may be given again")

    def run(self) -> int:
        """Print the models."""
        models = find_models([folder.expanduser() for folder in self.dir])
        if self.as_json:
            print(json.dumps([asdict(model) for model in models], indent=2))
        else:
            Console().print(listing(models))
        return 0
