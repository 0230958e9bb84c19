"""Integer codes with a scale and a bias for each group of columns: MLX's affine quantisation."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from quire.core.errors import ModelError

_GROUPS = (128, 64, 32)
_BITS = (2, 3, 4, 5, 6, 8)


def unpack_words(words: mx.array, bits: int) -> mx.array:
    """Unpack words `[..., n]` into codes `[..., n * 32 // bits]` in uint32, low bits first.

    A code may continue in the next word.
    """
    words = mx.contiguous(words).view(mx.uint32)
    codes: mx.array
    if 32 % bits == 0:
        codes = words[..., None] >> mx.arange(0, 32, bits, dtype=mx.uint32)
        codes = (codes & (2**bits - 1)).flatten(-2)
        return codes
    starts = bits * mx.arange(words.shape[-1] * 32 // bits, dtype=mx.uint32)
    word, shift = starts // 32, starts % 32
    following = mx.concatenate([words[..., 1:], mx.zeros_like(words[..., :1])], axis=-1)
    codes = words[..., word] >> shift
    over = shift + bits > 32
    rest = following[..., word] << mx.where(over, 32 - shift, 0)
    codes = (codes | mx.where(over, rest, 0)) & (2**bits - 1)
    return codes


def pack_words(codes: mx.array, bits: int) -> mx.array:
    """Pack codes whose width divides 32; the inverse of `unpack_words`."""
    shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
    return (mx.unflatten(codes, -1, (-1, 32 // bits)) << shifts).sum(axis=-1).astype(mx.uint32)


@dataclass(frozen=True)
class AffineCodes:
    """A matrix `[rows, columns]` of `code * scale + bias`.

    Attributes:
        words: `[rows, columns * bits / 32]`, low bits first.
        bits: width of a code, 1 to 8.
        scales, biases: `[rows, groups]`.
        group_of: the group of each column, if groups are not consecutive.
    """

    words: mx.array
    bits: int
    scales: mx.array
    biases: mx.array
    group_of: mx.array | None = None

    @property
    def columns(self) -> int:
        return int(self.words.shape[-1]) * 32 // self.bits

    def tensors(self, path: str, dtype: mx.Dtype) -> dict[str, mx.array]:
        """Return MLX's tensors of the matrix, or the dequantised matrix if MLX lacks its width or
        group size.

        Raises:
            ModelError: codes, scales and groups do not fit each other.
        """
        self._check(path)
        groups = self.scales.shape[-1]
        size = self.columns // groups
        fitting = next((each for each in _GROUPS if size % each == 0), None)
        if fitting is None or self.bits not in _BITS or not self._in_order(size):
            return {f"{path}.weight": self._unpacked(size).astype(dtype)}
        ready = {f"{path}.weight": self.words}
        for name, array in (("scales", self.scales), ("biases", self.biases)):
            spread = mx.repeat(array, size // fitting, axis=1)
            ready[f"{path}.{name}"] = mx.contiguous(spread).astype(dtype)
        return ready

    def _check(self, path: str) -> None:
        words, scales, biases = (each.shape for each in (self.words, self.scales, self.biases))
        fits = len(words) == 2 == len(scales) and scales == biases and words[0] == scales[0]
        if fits and self.group_of is not None:
            groups = self.group_of
            inside = (groups >= 0) & (groups < scales[-1])
            fits = groups.shape == (self.columns,) and bool(inside.all().item())
        elif fits:
            fits = scales[-1] > 0 and self.columns % scales[-1] == 0
        if not fits:
            raise ModelError(
                f"tensor '{path}': words {list(words)} of {self.bits} bits a code, scales "
                f"{list(scales)} and groups do not fit each other"
            )

    def _in_order(self, size: int) -> bool:
        if self.group_of is None:
            return True
        return bool(mx.array_equal(self.group_of, mx.arange(self.columns) // size).item())

    def _unpacked(self, size: int) -> mx.array:
        groups = mx.arange(self.columns) // size if self.group_of is None else self.group_of
        numbers = unpack_words(self.words, self.bits).astype(mx.float32)
        scales, biases = (each.astype(mx.float32) for each in (self.scales, self.biases))
        return numbers * scales[:, groups] + biases[:, groups]
