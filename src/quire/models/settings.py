"""Reads `config.json` key by key, and checks the values' types."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from quire.core.errors import ModelError
from quire.core.values import Values, require
from quire.models.layers.rope import RopeParameters, rope_type

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

_CHANGES_RESULTS = {
    "attention_chunk_size",
    "attention_multiplier",
    "attn_logit_softcapping",
    "clip_qkv",
    "embedding_multiplier",
    "final_logit_softcapping",
    "kv_lora_rank",
    "lm_head_bias",
    "logit_scale",
    "logits_scaling",
    "n_routed_experts",
    "no_rope_layers",
    "norm_head",
    "num_experts",
    "num_local_experts",
    "qk_layernorm",
    "residual_multiplier",
    "scale_depth",
    "scale_emb",
    "use_bidirectional_attention",
    "use_cla",
    "use_parallel_residual",
    "use_qk_norm",
}
_ALIASES = (
    {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"},
    {"use_qk_norm", "qk_layernorm"},
    {"scale_emb", "embedding_multiplier"},
)
"""Names of the same setting. Libraries may write a second one beside the one that the
family reads.
"""
_NEUTRAL: tuple[Any, ...] = (None, False, 0, 1, [])


class Settings(Values):
    """The keys of a `config.json`, with helpers for families.

    Keys that no family asks for are ignored, such as training settings and versions.
    """

    def pairs(self, name: str) -> tuple[tuple[int, int], ...]:
        """Return a list of pairs of integers; empty if absent."""
        pairs = [self.like({name: each}).integers(name) for each in self._elements(name, list)]
        if any(len(pair) != 2 for pair in pairs):
            raise self._refused(name, self.values[name], "are not pairs")
        return tuple((first, second) for first, second in pairs)

    def objects(self, name: str) -> list[Settings]:
        """Return a list of objects; empty if absent."""
        return [self.like(each, f"{name}.") for each in self._elements(name, dict)]

    def tables(self, name: str) -> list[list[Settings]]:
        """Return a list of lists of objects; empty if absent."""
        lists = [self.like({name: each}) for each in self._elements(name, list)]
        within = f"{name}."
        return [[self.like(e, within) for e in one._elements(name, dict)] for one in lists]

    def changed(self, **changes: Any) -> Settings:
        """Return the settings with other values."""
        return self.like(self.values | changes)

    def filled(self, **defaults: Any) -> Settings:
        """Return the settings with values for absent keys."""
        given = {name: value for name, value in self.values.items() if value is not None}
        return self.like(defaults | given)

    def null(self, name: str) -> bool:
        """Return whether a key is present with the value null."""
        return not self.has(name) and name in self.values

    def window(self, default: int | None = None) -> int | None:
        """Return the number of tokens that a query of a sliding layer sees.

        Args:
            default: value if the key is absent; a null means no window.
        """
        if "sliding_window" not in self.values:
            return default
        return self.integer("sliding_window") if self.has("sliding_window") else None

    def refuse_unasked(self) -> None:
        """Refuse keys that change what other families compute and that this family did not read.

        Raises:
            ModelError: there is such a key; the message names it and its value.
        """
        for name in _CHANGES_RESULTS:
            way = self.prefix + name
            if way not in self._asked and not self._repeats(name):
                require(way, self.values.get(name), _NEUTRAL, file=self.file)

    def _repeats(self, name: str) -> bool:
        """Return whether a key has the same value as an alias that was read."""
        others = [each for names in _ALIASES if name in names for each in names - {name}]
        asked = [each for each in others if self.prefix + each in self._asked]
        return any(self.values.get(each) == self.values.get(name) for each in asked)

    def rope(self, *, theta: float = 1e4, partial: float | None = None) -> RopeParameters:
        """Return the rotary parameters of all layers.

        Args:
            theta: default theta.
            partial: default share of a head that is rotated; None if the family rotates whole heads
                and ignores `partial_rotary_factor`, as transformers does.

        Raises:
            ModelError: as `RopeParameters.from_dict`; or the configuration rotates part of each
                head with an extended context, in a family that rotates whole heads.
        """
        longest = self.integer("max_position_embeddings", default=0, minimum=0)
        trained = self.trained_context()
        values: dict[str, Any] = {
            "rope_theta": self.number("rope_theta", default=theta),
            "longer": bool(trained and longest > trained),
            "original_max_position_embeddings": trained or longest or None,
        }
        if longest and trained:
            values["factor"] = longest / trained
        if partial is not None or self.has("partial_rotary_factor"):
            values["partial_rotary_factor"] = self.number("partial_rotary_factor", default=partial)
        given = {name: value for name, value in self.scaling().values.items() if value is not None}
        given.pop("original_max_position_embeddings", None)  # read by `trained_context`
        rope = RopeParameters.from_dict(values | given)
        if partial is not None:
            return rope
        if rope.rope_type != "default":
            require("partial_rotary_factor", rope.partial_rotary_factor, (1.0,))
        return replace(rope, partial_rotary_factor=1.0)

    def scaling(self) -> Settings:
        """Return the rotary settings, under the key of transformers 4 or 5; empty if there are
        none.
        """
        return self.nested("rope_scaling", "rope_parameters", needed=False)

    def rope_type(self) -> str:
        """Return the rotary type of all layers."""
        return rope_type(self.scaling().values)

    def rope_types(self) -> set[str]:
        """Return the rotary types of all kinds of layers."""
        scaling = self.scaling().values
        by_kind = (part for part in scaling.values() if isinstance(part, dict))
        return {rope_type(part) for part in (scaling, *by_kind)}

    def trained_context(self) -> int | None:
        """Return the context length of training, if the configuration distinguishes it from the
        longest one.
        """
        key = "original_max_position_embeddings"
        for where in (self, self.scaling()):  # the outer one takes precedence
            if where.has(key):
                return where.integer(key)
        return None

    def rope_by_type(
        self, full: float, sliding: float, partial: float = 1.0
    ) -> tuple[RopeParameters, RopeParameters]:
        """Return the rotary parameters of full and of sliding layers. Only full ones may be
        extended.

        Args:
            full, sliding: default theta of each.
            partial: default share of a head that is rotated.
        """
        by_kind, parts = self.nested("rope_parameters", needed=False), []
        if not by_kind.has(FULL):
            flat = {"rope_type": "default"}
            theta = self.number("rope_theta", default=full)
            full_layers = {"rope_theta": theta} | (self.scaling().values or flat)
            by_kind = self.like({FULL: full_layers, SLIDING: flat})
        for kind, theta in ((FULL, full), (SLIDING, sliding)):
            longest = self.values.get("max_position_embeddings")
            part = by_kind.nested(kind, needed=False).filled(
                rope_theta=theta,
                original_max_position_embeddings=longest,
                partial_rotary_factor=partial,
            )
            parts.append(RopeParameters.from_dict(part.values))
        return parts[0], parts[1]

    def layer_types(
        self, default: list[str], known: Iterable[str] = (FULL, SLIDING)
    ) -> tuple[str, ...]:
        """Return the type of each layer, one of `known`."""
        types = self.names("layer_types") or tuple(default)
        for kind in types:
            require("layer_types", kind, known)
        layers = self.integer("num_hidden_layers")
        if len(types) != layers:
            raise ModelError(f"config.json: {len(types)} layer_types for {layers} layers")
        return types
