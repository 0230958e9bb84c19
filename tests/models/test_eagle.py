"""EAGLE-3 heads against transformers' layers, joined as vLLM joins them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.core.config import EngineConfig
from quire.engine.draft_opening import open_drafters
from quire.models.weights.loader import LoadedModel, open_model
from tests.models.solo import SoloStep
from tests.support import tiny_models
from tests.support.drafters import write_head

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="the oracle needs torch")
transformers = pytest.importorskip("transformers", reason="the oracle is transformers")

from transformers.models.llama import modeling_llama  # noqa: E402

from tests.models import oracle  # noqa: E402

TOKENS = [(7 * i * i + 3 * i) % 251 for i in range(40)]
GUESSES = 3


class Reference:
    """A head in torch."""

    def __init__(self, config: Any, weights: dict[str, mx.array], *, adds_norm: bool) -> None:
        self.weights = {name: torch.tensor(np.array(each)) for name, each in weights.items()}
        self.config, self.adds_norm = config, adds_norm
        self.layer = modeling_llama.LlamaDecoderLayer(config, 0)
        attention = self.layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = self.weights[f"midlayer.self_attn.{name}.weight"]
            getattr(attention, name).weight = torch.nn.Parameter(rows)
        attention.o_proj.weight = torch.nn.Parameter(
            self.weights["midlayer.self_attn.o_proj.weight"]
        )
        for name in ("gate_proj", "up_proj", "down_proj"):
            rows = self.weights[f"midlayer.mlp.{name}.weight"]
            getattr(self.layer.mlp, name).weight = torch.nn.Parameter(rows)
        self.rotary = modeling_llama.LlamaRotaryEmbedding(config)

    def norm(self, name: str, x: Any) -> Any:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weights[name] * x * torch.rsqrt(variance + self.config.rms_norm_eps)

    def __call__(self, states: Any, embeddings: Any) -> Any:
        """`[T, hidden]` -> the head's states."""
        normed = self.norm("midlayer.hidden_norm.weight", states)
        joined = torch.cat([self.norm("midlayer.input_layernorm.weight", embeddings), normed], -1)
        places = torch.arange(len(states))[None]
        mask = torch.full((len(states), len(states)), -torch.inf).triu(1)[None, None]
        mixed, _ = self.layer.self_attn(
            joined[None], self.rotary(joined[None], places), attention_mask=mask
        )
        x = (normed if self.adds_norm else states) + mixed[0]
        return x + self.layer.mlp(self.norm("midlayer.post_attention_layernorm.weight", x))

    def logits(self, states: Any) -> Any:
        return self.norm("norm.weight", states) @ self.weights["lm_head.weight"].T


@pytest.mark.parametrize("adds_norm", [False, True])
def test_guesses_are_those_of_the_published_head(tmp_path: Path, adds_norm: bool) -> None:
    own = transformers.LlamaConfig(**tiny_models.llama_config(num_hidden_layers=8))
    target = oracle.save_random(own, tmp_path / "model")
    loaded: LoadedModel = open_model(str(tmp_path / "model"), dtype="float32")
    changes = {"eagle_config": {}, "norm_before_residual": adds_norm}
    weights = write_head(tmp_path / "head", loaded, **changes)
    settings = EngineConfig(
        str(tmp_path), kv_memory=64 << 20, draft_model=str(tmp_path / "head"), speculate="draft"
    )
    head = open_drafters(loaded, settings).drafters[-1]._model
    text = transformers.AutoConfig.from_pretrained(tmp_path / "head")
    text._attn_implementation = "eager"
    reference = Reference(text, weights, adds_norm=adds_norm)
    with torch.no_grad():
        hidden = target(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
        joined = torch.cat([hidden[each][0, :-1] for each in (2, 4, 5)], dim=-1)
        states = joined @ reference.weights["fc.weight"].T
        table = target.get_input_embeddings().weight
        read = TOKENS[1:]
        wanted = []
        for _ in range(GUESSES):
            after = reference(states, table[read])
            wanted.append(reference.logits(after[-1]))
            read.append(2 * int(wanted[-1].argmax()))  # the head has every second token
            states = torch.cat([states, after[-1:]])
    output = loaded.model(SoloStep(loaded.model.layout, TOKENS[:-1]))
    ours = head.project(output[:, own.hidden_size :])
    tokens = TOKENS[1:]
    for expected in wanted:
        after = head.forward(SoloStep(head.layout, tokens), ours)
        logits = head.logits(after[-1:])[0]
        assert mx.all(mx.isinf(logits[1::2])).item()
        error = mx.abs(logits[::2] - mx.array(expected.numpy())).max().item()
        assert error < 2e-4
        tokens.append(int(mx.argmax(logits).item()))
        ours = mx.concatenate([ours, after[-1:]])
    assert tokens == read
