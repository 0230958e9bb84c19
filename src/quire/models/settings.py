"""Reading `config.json` key by key, with the types of its values checked."""

from __future__ import annotations

from typing import Any

from quire.core.errors import ModelError
from quire.models.arguments import require
from quire.models.rope import RopeParameters

FULL, SLIDING = "full_attention", "sliding_attention"

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
_NEUTRAL: tuple[Any, ...] = (None, False, 0, 1, [])


class Settings:
    """The keys of a configuration. A null counts as absent.

    Each reader takes the names that a key has had, of which the first present counts, and raises
    `ModelError`, naming the key, for a value of another type, or where none is there and no default
    was given. Keys that nobody asks for are not the model's business (training, versions).
    """

    def __init__(self, values: dict[str, Any], asked: set[str] | None = None) -> None:
        self.values = values
        self._asked: set[str] = set() if asked is None else asked

    def integer(self, *names: str, default: int | None = None) -> int:
        return int(self._typed(names, default, int))

    def number(self, *names: str, default: float | None = None) -> float:
        return float(self._typed(names, default, (int, float)))

    def flag(self, *names: str, default: bool | None = None) -> bool:
        return bool(self._typed(names, default, bool))

    def word(self, *names: str, default: str | None = None) -> str:
        return str(self._typed(names, default, str))

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of numbers; empty if absent."""
        return tuple(self._typed((name,), [], list))

    def names(self, name: str) -> tuple[str, ...]:
        """A list of words; empty if absent."""
        return tuple(str(each) for each in self._typed((name,), [], list))

    def has(self, name: str) -> bool:
        """Whether the key is there and not null."""
        self._asked.add(name)
        return self.values.get(name) is not None

    def within(self, name: str) -> Settings:
        """The keys of a part, such as `text_config`; this configuration if it has no such part."""
        if not self.has(name):
            return self
        return Settings(self._typed((name,), None, dict), self._asked)

    def changed(self, **changes: Any) -> Settings:
        """The same with other values."""
        return Settings(self.values | changes, self._asked)

    def only(self, name: str, *known: Any) -> None:
        """Refuses a value that would change the result and that the family does not compute.

        An absent key is accepted.

        Raises:
            ModelError: naming the key, the value, and what is known.
        """
        if self.has(name):
            require(name, self.values[name], known)

    def filled(self, **defaults: Any) -> Settings:
        """The same with values for absent keys."""
        given = {name: value for name, value in self.values.items() if value is not None}
        return Settings(defaults | given, self._asked)

    def window(self, default: int | None = None) -> int | None:
        """How many tokens a query of a sliding layer sees.

        Args:
            default: where the key is absent; a null is no window.
        """
        if "sliding_window" not in self.values:
            return default
        return self.integer("sliding_window") if self.has("sliding_window") else None

    def refuse_unasked(self) -> None:
        """Refuses keys that change what other families compute and this one did not ask for.

        Raises:
            ModelError: naming the key and its value.
        """
        for name in _CHANGES_RESULTS - self._asked:
            require(name, self.values.get(name), _NEUTRAL)

    def rope(self, *, theta: float = 1e4, partial: float | None = None) -> RopeParameters:
        """The rotation of all layers.

        Args:
            theta: where the configuration has none.
            partial: the share of a head that is rotated where the configuration does not say;
                None where the family rotates whole heads.
        """
        config = {"rope_theta": theta} | {k: v for k, v in self.values.items() if v is not None}
        if partial is not None:
            config = {"partial_rotary_factor": partial} | config
        return RopeParameters.from_config(config, partial=partial is not None)

    def rope_by_type(self, full: float, sliding: float) -> tuple[RopeParameters, RopeParameters]:
        """The rotations of full and of sliding layers, of which only the full may be stretched.

        Args:
            full, sliding: theta of each where the configuration has none.
        """
        given: dict[str, Any] = self.values.get("rope_parameters") or {}
        if FULL not in given:
            flat = {"rope_type": "default"}
            theta = self.number("rope_theta", default=full)
            scaling: dict[str, Any] = self.values.get("rope_scaling") or given
            given = {FULL: {"rope_theta": theta} | (scaling or flat), SLIDING: flat}
        parts = []
        for kind, theta in ((FULL, full), (SLIDING, sliding)):
            part = {"rope_theta": theta} | (given.get(kind) or {})
            longest = self.values.get("max_position_embeddings")
            parts.append(
                RopeParameters.from_dict({"original_max_position_embeddings": longest} | part)
            )
        return parts[0], parts[1]

    def layer_types(self, default: list[str]) -> tuple[str, ...]:
        """One of `FULL` and `SLIDING` a layer."""
        types = tuple(self._typed(("layer_types",), default, list))
        for kind in types:
            require("layer_types", kind, (FULL, SLIDING))
        layers = self.integer("num_hidden_layers")
        if len(types) != layers:
            raise ModelError(f"config.json: {len(types)} layer_types for {layers} layers")
        return types

    def _typed(self, names: tuple[str, ...], default: Any, kind: Any) -> Any:
        self._asked.update(names)
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise ModelError(f"config.json: {name} = {value!r} is of the wrong type")
            return value
        if default is None:
            model_type = self.values.get("model_type")
            raise ModelError(f"config.json of a {model_type!r} model lacks {names[0]!r}")
        return default
