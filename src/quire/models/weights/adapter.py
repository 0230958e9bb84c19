"""LoRA adapters (arXiv:2106.09685), as PEFT and mlx-lm save them, merged into weights at load time.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint. Settings that change the
result and are not supported are refused by name.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from quire.core.errors import ModelError
from quire.core.folder import read_object
from quire.models.base import LanguageModel, named_parameters
from quire.models.weights import mlx_lm_adapter
from quire.models.weights.expert_factors import ExpertFactors, Factors
from quire.models.weights.hub import find_folder
from quire.models.weights.identity import WeightIdentity
from quire.models.weights.low_rank import LowRank, Placing
from quire.models.weights.names import Weights, without_wrapper
from quire.models.weights.quantization import unpacked
from quire.models.weights.safetensors import read_header

log = logging.getLogger("quire.models")

_PREFIX = "base_model.model."
_FACTORS = {
    "lora_A.weight": "A",
    "lora_B.weight": "B",
    "lora_embedding_A": "embedding A",
    "lora_embedding_B": "embedding B",
}
_READ = {
    "peft_type",
    "task_type",
    "bias",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "target_parameters",
    "modules_to_save",
    "init_lora_weights",
}
# Settings that concern training, or repeat what the tensors' names say.
_WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
}
_KNOWN = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    # Other methods (PiSSA, OLoRA, LoftQ, ...) change the base weights before training.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
_NEUTRAL: tuple[Any, ...] = (None, False, [], {})
_NOT_TEXT = re.compile(r"model\.(vision|visual|multi_modal|audio|embed_vision|embed_audio|mtp)")


@dataclass(frozen=True)
class Adapter:
    """An adapter's files, with checked settings.

    Attributes:
        config: the contents of `adapter_config.json`, in PEFT's form.
        file: the file of its tensors.
    """

    config: Mapping[str, Any]
    file: Path

    @classmethod
    def open(cls, path_or_hub_id: str) -> Adapter:
        """Open an adapter in a folder, or from the hub.

        Raises:
            ModelError: a file is missing, or a setting is not supported; the message names it.
        """
        folder = find_folder(path_or_hub_id)
        path, file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
        of_mlx_lm = not file.is_file() and (folder / mlx_lm_adapter.FILE).is_file()
        if of_mlx_lm:
            file = folder / mlx_lm_adapter.FILE
        for needed in (path, file):
            if not needed.is_file():
                raise ModelError(f"{folder}: no {needed.name}")
        config = read_object(path)
        if of_mlx_lm:
            config = mlx_lm_adapter.peft_settings(path, config)
        _check(path, config)
        return cls(config, file)

    @property
    def identity(self) -> str:
        """A text that differs between adapters with different settings."""
        return json.dumps(dict(self.config), sort_keys=True)

    def merged(self, weights: Weights, model: LanguageModel, dtype: mx.Dtype | None) -> Weights:
        """Return a checkpoint's tensors, under its own names, with the adapter merged.

        Quantised matrices that the adapter changes are dequantised; the log says how many.

        Args:
            model: the model that the tensors belong to.
            dtype: dtype of changed matrices; None keeps theirs.

        Raises:
            ModelError: a tensor of the adapter has no place, or the wrong shape.
        """
        factors, whole = self._sorted(self._tensors())
        merging = _Merging(dict(weights), model, dtype, file=self.file)
        experts = ExpertFactors(weights, self.file)
        for module, parts in factors.items():
            for name, (first, second) in self._changes(experts, module, parts).items():
                merging.add(module, name, first, second=second)
        for name, array in whole.items():
            merging.replace(name, array)
        if merging.unpacked:
            log.warning("%s: %d packed matrices are unpacked", self.file, merging.unpacked)
        return merging.weights

    def beside(self, weights: Weights, model: LanguageModel, dtype: mx.Dtype) -> LowRank:
        """Return the factors by layers of the model, for requests that name the adapter.

        Args:
            weights: the checkpoint's tensors under its own names; they are not evaluated.
            model: the model, with its weights loaded.
            dtype: dtype of the factors.

        Raises:
            ModelError: a tensor of the adapter has no place, or can only be merged.
        """
        factors, whole = self._sorted(self._tensors())
        if whole:
            raise ModelError(
                f"{self.file}: {min(whole)!r} is a whole tensor; merge this adapter into the "
                "weights (--adapter FOLDER)"
            )
        changes: dict[str, Factors] = {}
        experts = ExpertFactors(weights, self.file)
        for module, parts in factors.items():
            if "A" not in parts:
                raise ModelError(
                    f"{self.file}: {module!r} is a table; merge this adapter into the weights "
                    "(--adapter FOLDER)"
                )
            for name, own in self._changes(experts, module, parts).items():
                place = experts.names.get(without_wrapper(name))
                if place is None:
                    raise ModelError(f"{self.file}: the model has no matrix {module!r}")
                changes[place] = own
        with WeightIdentity([self.file]) as identity:
            placed = Placing(weights, model, dtype, file=self.file).placed(changes)
            return LowRank(placed, identity.digest(self.identity.encode()))

    def _tensors(self) -> Weights:
        read_header(self.file)
        tensors = mx.load(str(self.file))
        assert isinstance(tensors, dict)
        if self.file.name == mlx_lm_adapter.FILE:
            return mlx_lm_adapter.peft_tensors(self.file, tensors)
        return tensors

    def _sorted(self, tensors: Weights) -> tuple[dict[str, dict[str, mx.array]], Weights]:
        """Return factors by module, and whole tensors by name, both without PEFT's prefix."""
        factors: dict[str, dict[str, mx.array]] = {}
        whole: Weights = {}
        saved = self.config.get("modules_to_save") or []
        for name, array in tensors.items():
            inner = name.removeprefix(_PREFIX)
            end = next((end for end in _FACTORS if inner.endswith(f".{end}")), None)
            if end is not None:
                factors.setdefault(inner.removesuffix(f".{end}"), {})[_FACTORS[end]] = array
            elif any(f".{module}." in f".{inner}" for module in saved):
                whole[inner] = array
            else:
                raise ModelError(f"{self.file}: tensor {name!r} is not known")
        for setting, found in (("target_modules", factors), ("modules_to_save", whole)):
            named = self.config.get(setting) or []
            for module in named if isinstance(named, list) else []:
                if not any(f".{module}." in f".{each}." for each in found):
                    raise ModelError(f"{self.file}: no tensor for {module!r} of {setting}")
        named = self.config.get("target_parameters")
        if named and not any(map(ExpertFactors.is_stack, factors)):
            raise ModelError(f"{self.file}: no tensor for target_parameters = {named}")
        return factors, whole

    def _changes(
        self, experts: ExpertFactors, module: str, parts: Mapping[str, mx.array]
    ) -> dict[str, Factors]:
        """Return a module's factors by the names of the tensors that they change.

        Raises:
            ModelError: they are not two of the rank that the settings name, or are for experts that
                the checkpoint has not.
        """
        rank = _by_pattern(self.config.get("rank_pattern"), module, self.config["r"])
        alpha = _by_pattern(self.config.get("alpha_pattern"), module, self.config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        pair = _pair(parts)
        if pair is None or not _fit(module, *pair, rank=rank):
            raise ModelError(f"{self.file}: {module!r} does not have two factors of rank {rank}")
        first, second = pair[0], scale * pair[1].astype(mx.float32)
        if ExpertFactors.are_in(module, first):
            return experts.spread(module, first, second, rank=rank)
        return {f"{module}.weight": (first, second)}


def _pair(parts: Mapping[str, mx.array]) -> Factors | None:
    """Return the two factors of a module; of a table, `[rank, dim]` and `[tokens, rank]`."""
    if parts.keys() == {"A", "B"}:
        return parts["A"], parts["B"]
    if parts.keys() == {"embedding A", "embedding B"}:
        return parts["embedding B"].T, parts["embedding A"].T
    return None


def _fit(module: str, first: mx.array, second: mx.array, rank: int) -> bool:
    """Return whether two factors are of a rank, or stack those of experts."""
    if first.ndim == 2 and ExpertFactors.are_in(module, first):
        return first.shape[0] == second.shape[1] and first.shape[0] % rank == 0
    return min(first.ndim, second.ndim) >= 2 and (first.shape[-2], second.shape[-1]) == (rank, rank)


@dataclass
class _Merging:
    """The weights of a model while an adapter is merged."""

    weights: Weights
    model: LanguageModel
    dtype: mx.Dtype | None
    file: Path
    unpacked: int = 0

    def __post_init__(self) -> None:
        self._names = {without_wrapper(name): name for name in self.weights}
        self._tied = "lm_head.weight" not in named_parameters(self.model)

    def add(self, module: str, tensor: str, first: mx.array, second: mx.array) -> None:
        """Add the product of a module's factors to a tensor, `second @ first`."""
        name = self._place(tensor)
        path = name.removesuffix(".weight")
        self.unpacked += f"{path}.scales" in self.weights
        if path == name:  # a stack of experts, without codes
            base = self.weights.pop(name)
        else:
            base = unpacked(self.weights, path, first.shape[-1])
        product = second.astype(mx.float32) @ first.astype(mx.float32)
        if base.shape != product.shape:
            raise ModelError(
                f"{self.file}: the factors of {module!r} make {second.shape[-2]} x "
                f"{first.shape[-1]}, the weight has shape {list(base.shape)}"
            )
        self.weights[name] = (base + product).astype(self.dtype or base.dtype)

    def replace(self, name: str, array: mx.array) -> None:
        """Replace the checkpoint's tensor by a whole tensor of the adapter."""
        place = self._place(name)
        path = place.removesuffix(".weight")
        if f"{path}.scales" in self.weights:
            self.unpacked += 1
            unpacked(self.weights, path, array.shape[-1])
        elif self.weights[place].shape != array.shape:
            raise ModelError(
                f"{self.file}: {name!r} has shape {list(array.shape)}, the weight "
                f"{list(self.weights[place].shape)}"
            )
        self.weights[place] = array.astype(self.dtype or array.dtype)

    def _place(self, name: str) -> str:
        """Return the checkpoint's name of a tensor that the adapter changes."""
        plain = without_wrapper(name)
        found = self._names.get(plain)
        if found is None or (_NOT_TEXT.match(plain) and self.model.vision is None):
            raise ModelError(f"{self.file}: the model has no tensor {name!r}")
        if self._tied and ("embed_tokens." in plain or plain.startswith("lm_head.")):
            raise ModelError(
                f"{self.file}: cannot change {name!r}: embedding table and head are tied"
            )
        return found


def _check(path: Path, config: dict[str, Any]) -> None:
    for name, value in config.items():
        known = _KNOWN.get(name, None if name in _READ | _WITHOUT_EFFECT else _NEUTRAL)
        if known is not None and value not in known:
            raise ModelError(f"{path}: {name} = {value!r} is not supported")
    for name in ("r", "lora_alpha"):
        _check_positive(path, name, config.get(name))
    for name, kinds in (
        ("use_rslora", bool),
        ("rank_pattern", dict),
        ("alpha_pattern", dict),
        ("target_modules", list | str),
        ("target_parameters", list),
        ("modules_to_save", list),
    ):
        value = config.get(name)
        if value is not None and not isinstance(value, kinds):
            raise ModelError(f"{path}: {name} = {value!r} is of a wrong type")
    for name in ("rank_pattern", "alpha_pattern"):
        for pattern, value in (config.get(name) or {}).items():
            _check_positive(path, f"{name}[{pattern!r}]", value)
            try:
                _module_pattern(pattern)
            except re.error as error:
                raise ModelError(
                    f"{path}: {name} has {pattern!r}, which is no regular expression: {error}"
                ) from error


def _check_positive(path: Path, name: str, value: object) -> None:
    if not isinstance(value, int | float) or value <= 0:
        raise ModelError(f"{path}: {name} = {value!r} is no positive number")


def _module_pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({pattern})$")


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, usual: Any) -> Any:
    """Return the value of the first pattern that matches the end of a module's name, as
    PEFT does.
    """
    for pattern, value in (patterns or {}).items():
        if _module_pattern(pattern).match(module):
            return value
    return usual
