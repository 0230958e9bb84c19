"""A `Step` of one whole sequence: what a model computes when nobody shares the step with it."""

from __future__ import annotations

import mlx.core as mx

from quire.cache.specs import LayerSpec, RecurrentState, SharedKV, WindowKV
from quire.models.base import LanguageModel, RecurrentSegment


class SoloSegment:
    """One sequence that begins with this step."""

    def __init__(self, rows: int, spec: RecurrentState, dtype: mx.Dtype) -> None:
        self.n, self.t, self.rows = 1, rows, mx.arange(rows)
        self.written: dict[str, mx.array] = {}
        self._zeros = {
            name: mx.zeros((1, *shape), dtype=mx.float32 if part == "float32" else dtype)
            for name, shape, part in spec.arrays
        }

    def read(self, name: str) -> mx.array:
        return self._zeros[name]

    def write(self, name: str, value: mx.array) -> None:
        assert value.shape == self._zeros[name].shape
        self.written[name] = value


class SoloStep:
    """The whole prompt at once, plain attention with an explicit mask from the layer's spec."""

    def __init__(self, layout: tuple[LayerSpec, ...], tokens: list[int]) -> None:
        self.tokens = mx.array(tokens, dtype=mx.int32)
        self.positions = mx.arange(len(tokens), dtype=mx.int32)
        self.embeddings: mx.array | None = None
        self._layout = layout
        self._stored: dict[int, tuple[mx.array, mx.array]] = {}

    def attend(
        self,
        layer: int,
        q: mx.array,
        k: mx.array | None,
        v: mx.array | None,
        *,
        scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array:
        spec = self._layout[layer]
        source = spec.layer if isinstance(spec, SharedKV) else layer
        if k is not None and v is not None:
            assert not isinstance(spec, SharedKV)
            self._stored[layer] = (k, v)
        k, v = self._stored[source]
        distance = self.positions[:, None] - self.positions[None, :]
        visible = distance >= 0
        spec = self._layout[source]
        if isinstance(spec, WindowKV):
            visible = visible & (distance < spec.window)
        out = mx.fast.scaled_dot_product_attention(
            q.swapaxes(0, 1)[None],
            k.swapaxes(0, 1)[None],
            v.swapaxes(0, 1)[None],
            scale=scale,
            mask=visible,
            sinks=sinks,
        )
        return out[0].swapaxes(0, 1)

    def only_wanted(self) -> None:
        """All rows are."""

    def recurrent(self, layer: int) -> list[RecurrentSegment]:
        spec = self._layout[layer]
        assert isinstance(spec, RecurrentState)
        return [SoloSegment(len(self.tokens), spec, mx.float32)]


def solo_logits(model: LanguageModel, tokens: list[int]) -> mx.array:
    """Logits `[len(tokens), vocab]` of one sequence computed at once."""
    return model.logits(model(SoloStep(model.layout, tokens)))


def greedy_choices(model: LanguageModel, prompt: list[int], answer: list[int]) -> list[int]:
    """What the model would choose at each place of `answer`, given what stands before it.

    Equal to `answer` exactly if greedy decoding of `prompt` gives `answer`: by induction, and in
    one pass instead of one a token.
    """
    logits = solo_logits(model, prompt + answer[:-1])[len(prompt) - 1 :]
    choices: list[int] = mx.argmax(logits, axis=-1).tolist()
    return choices


def solo_greedy(model: LanguageModel, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation, everything computed anew for each token."""
    tokens = list(prompt)
    for _ in range(count):
        hidden = model(SoloStep(model.layout, tokens))
        tokens.append(int(mx.argmax(model.logits(hidden[-1:])[0]).item()))
    return tokens[len(prompt) :]
