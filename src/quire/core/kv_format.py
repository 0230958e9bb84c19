"""Names of the ways to store blocks of keys and values. Frozen, hashable, free of arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How KV blocks are stored.

    Attributes:
        scheme: "plain", "page", "uniform" or "turbo".
        key_bits, value_bits: bits a code (3.5 is turbo's K3 V4); 0 for plain.
        group_size: elements that share a scale, for uniform.
        dtype: plain: "" (the model's), "float32", "float16" or "bfloat16".
        skip_layers: layers kept plain in a packed format, by index; part of a block's identity.
    """

    scheme: str = "plain"
    key_bits: float = 0
    value_bits: float = 0
    group_size: int = 64
    dtype: str = ""
    skip_layers: tuple[int, ...] = ()

    @property
    def has_tail(self) -> bool:
        """Whether a sequence's last block, the tail, is stored uncoded until it is full."""
        return self.scheme == "page"

    def skipping(self, layers: tuple[int, ...]) -> KVFormat:
        """Return the format with these layers skipped; a plain format skips none."""
        return self if self.scheme == "plain" else replace(self, skip_layers=layers)

    def of_layer(self, layer: int) -> KVFormat:
        """Return how one layer stores its blocks: plain in skipped layers."""
        return KVFormat() if layer in self.skip_layers else replace(self, skip_layers=())

    @property
    def name(self) -> str:
        """A short stable name, such as `plain`, `page-4`, `page-8/4` or `uniform-8-g64`."""
        if self.scheme == "plain":
            return f"plain-{self.dtype}" if self.dtype else "plain"
        bits = f"{self.key_bits:g}"
        if self.value_bits != self.key_bits:
            bits += f"/{self.value_bits:g}"
        group = f"-g{self.group_size}" if self.scheme == "uniform" else ""
        return f"{self.scheme}-{bits}{group}"
