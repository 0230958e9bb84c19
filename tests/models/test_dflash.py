"""DFlash drafters against transformers' layers, with the keys that their paper says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.core.config import EngineConfig
from quire.engine.draft_blocks import BlockDrafter
from quire.engine.draft_opening import open_drafters
from quire.models.dflash import DFlash
from quire.models.weights.loader import open_model
from quire.scheduler.draft_lengths import EveryDraft
from quire.scheduler.drafts import Draft, DraftQuery
from tests.support import tiny_models
from tests.support.drafters import write_dflash
from tests.support.parity import Company, prompts

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="the oracle needs torch")
transformers = pytest.importorskip("transformers", reason="the oracle is transformers")

from transformers.models.qwen3 import modeling_qwen3  # noqa: E402

from tests.models import oracle  # noqa: E402

MASK, BLOCK = 7, 8


class Reference:
    """A drafter in torch: context and block side by side, each row of the block sees all."""

    def __init__(self, config: Any, weights: dict[str, mx.array], target: Any) -> None:
        self.weights = {name: torch.tensor(np.array(each)) for name, each in weights.items()}
        self.target, self.config = target, config
        self.layers = []
        for index in range(config.num_hidden_layers):
            layer = modeling_qwen3.Qwen3DecoderLayer(config, index)
            prefix = f"layers.{index}."
            own = {
                name.removeprefix(prefix): each
                for name, each in self.weights.items()
                if name.startswith(prefix)
            }
            layer.load_state_dict(own)
            self.layers.append(layer)
        self.rotary = modeling_qwen3.Qwen3RotaryEmbedding(config)

    def norm(self, name: str, x: Any) -> Any:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return self.weights[name] * scaled

    def guesses(self, tokens: list[int], count: int) -> list[int]:
        """Return the likeliest tokens after `tokens`."""
        with torch.no_grad():
            known = torch.tensor([tokens[:-1]])
            hidden = self.target(known, output_hidden_states=True).hidden_states
            joined = torch.cat([hidden[1], self.last(known)], dim=-1)
            context = self.norm("hidden_norm.weight", joined @ self.weights["fc.weight"].T)
            x = self.target.get_input_embeddings()(torch.tensor([[tokens[-1]] + [MASK] * count]))
            for layer in self.layers:
                x = self.layer(layer, x, context)
            logits = self.target.lm_head(self.norm("norm.weight", x))[0, 1:]
            return [int(each) for each in logits.argmax(-1)]

    def last(self, known: Any) -> Any:
        """Return the last layer's output, before the norm."""
        kept = []
        hook = self.target.model.layers[-1].register_forward_hook(
            lambda _, __, out: kept.append(out[0] if isinstance(out, tuple) else out)
        )
        self.target(known)
        hook.remove()
        return kept[0]

    def layer(self, layer: Any, x: Any, context: Any) -> Any:
        attention, heads = layer.self_attn, (-1, self.config.head_dim)
        normed = layer.input_layernorm(x)
        keyed = torch.cat([context, normed], dim=1)
        q = attention.q_norm(attention.q_proj(normed).unflatten(-1, heads)).transpose(1, 2)
        k = attention.k_norm(attention.k_proj(keyed).unflatten(-1, heads)).transpose(1, 2)
        v = attention.v_proj(keyed).unflatten(-1, heads).transpose(1, 2)
        cosines, sines = self.rotary(keyed, torch.arange(keyed.shape[1])[None])
        _, k = modeling_qwen3.apply_rotary_pos_emb(k, k, cosines, sines)
        own = slice(context.shape[1], None)
        q, _ = modeling_qwen3.apply_rotary_pos_emb(q, q, cosines[:, own], sines[:, own])
        share = self.config.num_attention_heads // self.config.num_key_value_heads
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q, k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        )
        x = x + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        return x + layer.mlp(layer.post_attention_layernorm(x))


def test_blocks_are_those_of_the_published_formula(tmp_path: Path) -> None:
    """Blocks are drafted in an engine: prompts in chunks, in a batch, with right and wrong
    drafts.
    """
    own = transformers.LlamaConfig(**tiny_models.llama_config())
    target = oracle.save_random(own, tmp_path / "model")
    loaded = open_model(str(tmp_path / "model"), dtype="float32")
    weights = write_dflash(tmp_path / "drafter", loaded)
    settings = EngineConfig(
        str(tmp_path),
        kv_memory=64 << 20,
        draft_model=str(tmp_path / "drafter"),
        speculate="draft",
        max_step_tokens=33,
        dtype="float32",
        prefix_cache=False,
    )
    found = open_drafters(loaded, settings)
    drafter = found.drafters[-1]
    assert isinstance(drafter, BlockDrafter)
    assert isinstance(drafter._model, DFlash)
    seen: list[tuple[list[int], tuple[int, ...]]] = []

    def recording(queries: list[DraftQuery]) -> list[Draft | None]:
        drafts = BlockDrafter.propose(drafter, queries)
        for query, draft in zip(queries, drafts, strict=True):
            if draft is not None:
                seen.append((list(query.tokens), draft.tokens))
        return drafts

    drafter.propose = recording  # type: ignore[method-assign,assignment]
    company = Company(loaded, found.config, (drafter,), EveryDraft(), guesser=found.guesser)
    company.run(prompts((3, 40, 70), tokens=16), every=3)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "drafter")
    config._attn_implementation = "eager"
    reference = Reference(config, weights, target)
    assert len(seen) > 20
    assert max(len(drafted) for _, drafted in seen) == BLOCK - 1
    for tokens, drafted in seen[::9]:
        assert list(drafted) == reference.guesses(tokens, len(drafted))
