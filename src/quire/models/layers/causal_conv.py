"""The short causal convolution of recurrent layers."""

from __future__ import annotations

import mlx.core as mx

from quire.models.base import ForwardContext, Module


class CausalConv(Module):
    """One filter per channel over a sequence's last tokens. Parameters: weight, optional bias."""

    def __init__(self, channels: int, kernel: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = mx.zeros((channels, kernel, 1))
        if bias:
            self.bias = mx.zeros(channels)

    def __call__(
        self, x: mx.array, step: ForwardContext, layer: int, *, silu: bool = False
    ) -> mx.array:
        """Convolve `[T, channels]`, then apply SiLU if `silu`; see `ForwardContext.convolve`."""
        return step.convolve(layer, x, self.weight.squeeze(-1), bias=self.get("bias"), silu=silu)
