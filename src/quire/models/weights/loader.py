"""Opens models: finds the files, builds the family's model, checks that it fits, loads the
weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from quire.core.end_tokens import end_token_ids
from quire.core.errors import ModelError
from quire.core.original_configs import read_config
from quire.device.device import current_device
from quire.device.dtypes import DTYPES
from quire.device.ranks import WHOLE, Part
from quire.models.base import LanguageModel, named_parameters
from quire.models.layers.linear import (
    use_device_products,
)
from quire.models.registry import FAMILIES, build
from quire.models.settings import Settings
from quire.models.shares import Stage
from quire.models.split import split_by_layers, split_model
from quire.models.tokenizers.conversion import with_tokenizer
from quire.models.weights import quantization
from quire.models.weights.adapter import Adapter
from quire.models.weights.files import WeightFiles, find_weights
from quire.models.weights.foreign_packing import unsupported_method
from quire.models.weights.hub import find_folder
from quire.models.weights.identity import WeightIdentity
from quire.models.weights.layouts import replaced_dtype, store_for_device, widen_codes
from quire.models.weights.low_rank import LowRank
from quire.models.weights.pieces import Pieces
from quire.models.weights.projections import open_projections, projections, weight_files

_WIDE = ("e_score_correction_bias", "expert_bias", "freqs_cis_golden")
"""Ends of names of tensors that are never narrowed: small differences rank experts, and angles need
full precision.
"""

_EVAL_BYTES = 256 << 20  # weights evaluated at once; bounds the memory that conversions hold twice

CheckRoom = Callable[[LanguageModel, mx.Dtype, int], None]
"""Raises `NoRoom` unless a model fits. Takes the model, its activations' type, and its weights'
bytes.
"""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        config: the contents of `config.json`.
        path: the folder that holds weights, tokenizer and template.
        eos_ids: ids of all tokens that end an answer, from config, generation config and tokenizer.
        fingerprint: a hash of every byte of weights and adapter, of the configuration, and of the
            dtype. Of a split model only the first rank hashes the weights.
        parameters: number of the weights, packed or not; of a split model, of all its parts.
        parameter_bytes: bytes of the weights in memory.
        context_length: the most tokens of prompt and answer together.
        trained_length: context length of training, see `trained_length`.
        dtype: name of the activations' type, e.g. "bfloat16".
        read_adapter: loads an adapter that requests name, by its folder or hub id.
        layers_by_rank: the layers of the layout that each process has, of a model split by layers.
    """

    model: LanguageModel
    config: dict[str, Any]
    path: Path
    eos_ids: frozenset[int]
    fingerprint: str
    parameter_bytes: int
    context_length: int
    trained_length: int
    dtype: str
    read_adapter: Callable[[str], LowRank]
    layers_by_rank: tuple[range, ...] = ()
    parameters: int = 0


def open_model(
    path_or_hub_id: str,
    *,
    dtype: str = "",
    adapter: str | None = None,
    max_context: int | None = None,
    part: Part = WHOLE,
    pipeline: tuple[int, ...] = (),
    with_head: bool = False,
    check_room: CheckRoom = lambda model, dtype, nbytes: None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> LoadedModel:
    """Load a model from a folder or from the Hugging Face hub.

    Args:
        dtype: "float32", "float16" or "bfloat16"; "" means the checkpoint's on a GPU, but bfloat16
            instead of float16 on CUDA, and float32 on a CPU, which has no faster type.
        adapter: folder or hub id of a LoRA adapter to merge into the weights.
        max_context: the most tokens of prompt and answer together; None means the model's maximum.
            LongRoPE's rotations depend on whether it exceeds the trained context.
        part: this process's part of a split model.
        pipeline: weights of all processes by which layers are divided; empty splits each layer.
        check_room: called before the weights are loaded.
        on_progress: called with the bytes of weights loaded so far, and the total.
        with_head: whether to load the checkpoint's multi-token prediction head, if it has one.

    Raises:
        ModelError: the folder cannot be opened; the message names what is wrong with it.
    """
    folder = with_tokenizer(find_folder(path_or_hub_id))
    added = None if adapter is None else Adapter.open(adapter)
    config = _for_context(checked_config(folder), max_context)
    model, files, behind = build(config), find_weights(folder), projections(folder)
    parameters = sum(each.size for each in named_parameters(model).values())
    target = _target(dtype) or files.default_dtype
    with WeightIdentity(_hashed(files, added, behind, part=part)) as identity:
        model, layers_by_rank = _load_weights(
            *(model, part, files, config, folder, target, added, check_room),
            with_head=with_head,
            stage=Stage(part, pipeline) if pipeline else None,
        )
        if behind:
            model["pooled"] = open_projections(behind)
        _evaluate(model.eval(), on_progress)
        resolved = _dtype_name(model)
        fingerprint = identity.digest(_described(config, resolved, added, model=model).encode())
    return LoadedModel(
        model=model,
        config=config,
        path=folder,
        eos_ids=end_token_ids(folder),
        fingerprint=fingerprint,
        parameter_bytes=sum(array.nbytes for array in named_parameters(model).values()),
        context_length=context_length(config),
        trained_length=trained_length(config),
        dtype=resolved,
        read_adapter=partial(_beside, model, files, config, DTYPES[resolved]),
        layers_by_rank=layers_by_rank,
        parameters=parameters,
    )


def _target(dtype: str) -> mx.Dtype | None:
    """Return the type of weights that was asked for, or that the device prefers.

    Raises:
        ModelError: there is no such type.
    """
    if dtype and dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return DTYPES.get(dtype) or current_device().default_dtype


def _hashed(
    files: WeightFiles, added: Adapter | None, behind: Sequence[Path], part: Part
) -> list[Path]:
    """Return the files that this rank hashes."""
    if part.rank:
        return []
    return [*files.paths, *([added.file] if added else []), *weight_files(behind)]


def _described(
    config: dict[str, Any], dtype: str, added: Adapter | None, model: LanguageModel
) -> str:
    """Return all that identifies a model beside its weights."""
    parts = [config, dtype, added.identity if added else None]
    if model.layout != model.own_layout:
        parts.append("head")
    return json.dumps(parts, sort_keys=True)


def load_drafter(
    module: nn.Module,
    folder: Path,
    config: dict[str, Any],
    dtype: mx.Dtype,
    named: Callable[[dict[str, mx.array]], dict[str, mx.array]],
) -> None:
    """Give a module that drafts for a loaded model the weights of its own folder.

    Args:
        dtype: type of the model's activations.
        named: returns the checkpoint's tensors by the module's names.

    Raises:
        ModelError: the files do not fit the module.
    """
    weights = named(_cast(find_weights(folder).read(config, dtype), dtype))
    widen_codes(module, weights)
    _attach(module, weights, folder)
    module.eval()
    _evaluate(module, lambda done, total: None)


def _beside(
    model: LanguageModel,
    files: WeightFiles,
    config: dict[str, Any],
    dtype: mx.Dtype,
    adapter: str,
) -> LowRank:
    """Return the factors of an adapter for a loaded model."""
    return Adapter.open(adapter).beside(files.read(config, dtype), model, dtype)


def _load_weights(
    model: LanguageModel,
    part: Part,
    files: WeightFiles,
    config: dict[str, Any],
    folder: Path,
    target: mx.Dtype | None,
    adapter: Adapter | None,
    check_room: CheckRoom,
    *,
    with_head: bool,
    stage: Stage | None,
) -> tuple[LanguageModel, tuple[range, ...]]:
    """Attach weights to a model or to this process's part of it. Return it, and the layers of each
    process if it is split by layers. Weights stay lazy, except pieces of tensors.

    Args:
        target: dtype of the weights; None keeps theirs.
        with_head: see `open_model`.
    """
    try:
        # sanitize should compute in the type in which the weights are used.
        pieces = Pieces()
        read = files.read(config, target, pieces if part.size > 1 else None)
        if target is None:
            target = replaced_dtype(read)
        if with_head:
            model.add_heads(read)
        narrow = _stays_bfloat16(read)
        if adapter is not None:
            read = adapter.merged(read, model, target)
        cast = _cast(read, target)
        pieces.follow(read, cast)
        weights = model.sanitize(cast)
        layers: tuple[range, ...] = ()
        if stage is not None:
            model, weights, layers = split_by_layers(model, weights, stage)
        elif part.size > 1:
            model, weights = split_model(model, weights, part, take=pieces.take)
        widen_codes(model, weights)
        dtype = weights[model.typed_by].dtype if model.typed_by in weights else mx.float32
        check_room(model, dtype, _bytes(weights, narrow=narrow))
        _attach(model, pieces.read(weights), folder)
        return model, layers
    except ModelError as error:
        method = unsupported_method(config)
        if method is None:
            raise
        raise ModelError(f"{error} (quantization method {method!r} is not supported)") from error


def checked_config(folder: Path) -> dict[str, Any]:
    """Return a model folder's configuration, with transformers' keys.

    Raises:
        ModelError: the file is missing, names no `model_type`, or names an unsupported
            quantisation.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder}: no config.json")
    config = read_config(folder)
    if "model_type" not in config:
        raise ModelError(f"{path}: no 'model_type'")
    quantization.check_config(config)
    return config


def _for_context(config: dict[str, Any], limit: int | None) -> dict[str, Any]:
    """Return the configuration, with LongRoPE's short rotations if the limit is within the trained
    context.
    """
    settings = Settings(config)
    scaling, trained = settings.scaling().values, settings.trained_context()
    if not limit or not scaling or trained is None or limit > trained:
        return config
    return config | {"rope_scaling": scaling | {"longer": False}}


def _cast(weights: dict[str, mx.array], target: mx.Dtype | None) -> dict[str, mx.array]:
    """Convert all floats to one type, except `_WIDE` and scales of float codes. None converts
    nothing.
    """
    if target is None:
        return weights

    def cast(name: str, array: mx.array) -> mx.array:
        narrowed = name.endswith(_WIDE) and array.itemsize > target.size
        if name.endswith(".scales"):
            narrowed = quantization.has_float_codes(weights, name.removesuffix(".scales"))
        floating = mx.issubdtype(array.dtype, mx.floating)
        return array.astype(target) if floating and not narrowed else array

    return {name: cast(name, array) for name, array in weights.items()}


def _attach(model: nn.Module, weights: dict[str, mx.array], folder: Path) -> None:
    """Load the tensors into the model, which is quantised like the checkpoint.

    Raises:
        ModelError: a tensor is missing or unknown, or has the wrong shape or type.
    """
    quantization.pack_like(model, weights)
    use_device_products(model)
    places = named_parameters(model)
    _leave_out_empty_biases(weights, places)
    for problem, names in (
        ("has no tensor", places.keys() - weights.keys()),
        ("has a tensor that this family does not know,", weights.keys() - places.keys()),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ModelError(f"{folder}: {problem} {min(names)!r}{more}")
    for name, array in weights.items():
        if array.shape != places[name].shape:
            raise ModelError(
                f"{folder}: tensor {name!r} has shape {list(array.shape)}, "
                f"config.json asks for {list(places[name].shape)}"
            )
        if _kind(array) != _kind(places[name]):
            raise ModelError(
                f"{folder}: tensor {name!r} holds {_kind(array)}, "
                f"where {_kind(places[name])} belongs"
            )
    store_for_device(model, weights)
    model.load_weights(list(weights.items()))


def _leave_out_empty_biases(weights: dict[str, mx.array], places: Mapping[str, Any]) -> None:
    """Drop biases of zeros that a layer does not have: GPTQ's libraries wrote one for each
    layer.
    """
    for name in [name for name in weights if name.endswith(".bias") and name not in places]:
        if f"{name.removesuffix('bias')}weight" in places and not weights[name].any().item():
            del weights[name]


def _kind(array: mx.array) -> str:
    """Return an array's kind of numbers: all floats are one kind; codes differ by width."""
    if mx.issubdtype(array.dtype, mx.floating):
        return "floating point"
    return str(array.dtype).removeprefix("mlx.core.")


def _stays_bfloat16(weights: Mapping[str, mx.array]) -> bool:
    """Return whether all matrices are bfloat16, so that `_store_as_bfloat16` will store them so."""
    if current_device().kernels is None:
        return False
    floats = {array.dtype for name, array in weights.items() if _is_matrix(name, array)}
    return floats == {mx.bfloat16}


def _is_matrix(name: str, array: mx.array) -> bool:
    """Return whether a tensor is a matrix of floats, and no scales of codes."""
    floating = mx.issubdtype(array.dtype, mx.floating)
    return floating and array.ndim > 1 and not name.endswith((".scales", ".biases"))


def _bytes(weights: Mapping[str, mx.array], *, narrow: bool) -> int:
    """Return the bytes that weights take. If `narrow`, float32 matrices will be stored as
    bfloat16.
    """
    halved = (
        array.nbytes // 2
        if narrow and array.dtype == mx.float32 and _is_matrix(name, array)
        else array.nbytes
        for name, array in weights.items()
    )
    return sum(halved)


def _evaluate(model: nn.Module, on_progress: Callable[[int, int], None]) -> None:
    """Load and convert the weights in batches, so that few are in memory in both forms."""
    arrays, device = list(named_parameters(model).values()), current_device()
    batch: list[mx.array] = []
    batch_bytes = done = 0
    total = sum(array.nbytes for array in arrays)
    on_progress(done, total)
    for array in arrays:
        batch.append(array)
        batch_bytes += array.nbytes
        if batch_bytes >= _EVAL_BYTES:
            mx.eval(batch)
            device.settle(batch)
            done += batch_bytes
            on_progress(done, total)
            batch, batch_bytes = [], 0
    mx.eval(batch)
    device.settle(batch)
    quantization.check_scales(model)
    on_progress(total, total)


def _dtype_name(model: LanguageModel) -> str:
    """Return the activations' type."""
    return str(named_parameters(model)[model.typed_by].dtype).removeprefix("mlx.core.")


def context_length(config: dict[str, Any]) -> int:
    """Return the most tokens of prompt and answer together.

    YaRN (arXiv:2309.00071) is enabled by users, who leave `max_position_embeddings` unchanged, so
    its factor is applied.

    Raises:
        ModelError: the configuration has no such key.
    """
    family = FAMILIES.get(config.get("model_type", ""))
    if family is not None and family.context is not None:
        return family.context(Settings(config))
    text = Settings(config).within("text_config")
    length = text.integer("max_position_embeddings")
    if text.rope_type() != "yarn":
        return length
    rope = text.rope(partial=1.0)
    return max(length, int(rope.original_max_position_embeddings * rope.factor))


def trained_length(config: dict[str, Any]) -> int:
    """Return the context length of training, as far as the configuration gives it.

    It is the context length, unless `original_max_position_embeddings` is smaller and the rotations
    are not extended, as with YaRN and LongRoPE.

    Raises:
        ModelError: the configuration has no such key.
    """
    context, text = context_length(config), Settings(config).within("text_config")
    trained = text.integer("original_max_position_embeddings", default=context)
    return trained if text.rope_types() <= {"default", "proportional"} else context
