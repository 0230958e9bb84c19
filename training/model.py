"""Gemma 4 for training: packed rows, flex attention, Hugging Face's parameter names.

The same function as transformers' `Gemma4ForConditionalGeneration` (`training.check` proves it),
made for one thing: many short conversations packed into long rows, in bfloat16, on one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers.models.gemma4.configuration_gemma4 import Gemma4AudioConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4AudioModel

Mask = BlockMask | Tensor
"""A flex block mask, or `[B, 1, L, L]` booleans where flex attention has no backward (the CPU)."""


@dataclass
class Batch:
    """`B` packed rows of `L` tokens, `A` of them in answers.

    Beside them `I` pictures of at most `P` patches and `S` sounds of at most `F` frames.
    """

    tokens: Tensor  # [B, L]
    positions: Tensor  # [B, L], from 0 in each conversation
    documents: Tensor  # [B, L], the conversation that a token belongs to; -1 is padding
    pictures: Tensor  # [B, L], the picture that a token stands for, counted over the row; or -1
    soft_tokens: Tensor  # [B, L], index into the I * P / pooling**2 + S * F / 4 soft ones; or -1
    patches: Tensor  # [I, P, 3 * patch**2], bytes
    patch_positions: Tensor  # [I, P, 2], -1 where padding
    frames: Tensor  # [S, F, bins], in half precision
    frame_counts: Tensor  # [S], frames that are no padding
    answer_at: Tensor  # [A], index into B * L of the token before the one to predict
    answer: Tensor  # [A], token to predict; -100 is padding

    def to(self, device: torch.device) -> Batch:
        moved = {name: value.to(device, non_blocking=True) for name, value in self.__dict__.items()}
        return Batch(**moved)

    def pin_memory(self) -> Batch:
        """What a data loader calls so that the copy to the GPU need not wait."""
        return Batch(**{name: value.pin_memory() for name, value in self.__dict__.items()})


class Norm(nn.Module):
    """RMS norm in float32; without a weight it only normalises."""

    def __init__(self, size: int, with_scale: bool = True, initial: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), initial)) if with_scale else None

    def forward(self, x: Tensor) -> Tensor:
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return (normed if self.weight is None else normed * self.weight).type_as(x)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A bias-free projection that keeps the scale of its input."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of the last axis by the angles given."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Attention with Gemma 4's scale of one. `[B, heads, L, D]` in, `[B, L, heads * D]` out."""
    if isinstance(mask, BlockMask):
        out = flex_attention(q, k, v, block_mask=mask, scale=1.0, enable_gqa=True)
    else:
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=1.0, enable_gqa=q.shape[1] != k.shape[1]
        )
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).flatten(2)


class Mlp(nn.Module):
    """Gated GELU. `wrapped` gives the projections the extra level of the vision tower's names."""

    def __init__(self, hidden: int, inner: int, wrapped: bool = False) -> None:
        super().__init__()
        make = Wrapped if wrapped else linear
        self.gate_proj = make(hidden, inner)
        self.up_proj = make(hidden, inner)
        self.down_proj = make(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate = functional.gelu(self.gate_proj(x), approximate="tanh")
        out: Tensor = self.down_proj(gate * self.up_proj(x))
        return out


class Wrapped(nn.Module):
    """A projection under the name `linear`, as the vision tower's checkpoint has it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


class TextAttention(nn.Module):
    """Attention of one layer; a shared layer has no keys and values of its own."""

    def __init__(self, config: dict[str, Any], full: bool, shared: bool) -> None:
        super().__init__()
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        self.head_dim: int = config["global_head_dim"] if full else config["head_dim"]
        kv_heads = config["num_global_key_value_heads" if full else "num_key_value_heads"]
        sharp = self.head_dim**-0.25
        self.q_proj = linear(hidden, heads * self.head_dim)
        self.q_norm = Norm(self.head_dim, initial=sharp)
        self.o_proj = linear(heads * self.head_dim, hidden)
        if shared:
            return
        self.k_proj = linear(hidden, kv_heads * self.head_dim)
        self.k_norm = Norm(self.head_dim, initial=sharp)
        self.v_norm = Norm(self.head_dim, with_scale=False)
        self.v_proj = None if full else linear(hidden, kv_heads * self.head_dim)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, kv_heads, L, D]`; full layers use one projection for both."""
        raw = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        values = raw if self.v_proj is None else self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        keys = turn(self.k_norm(raw).transpose(1, 2), cos, sin)
        return keys, self.v_norm(values).transpose(1, 2)

    def forward(
        self, x: Tensor, kv: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, mask: Mask
    ) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        out: Tensor = self.o_proj(attend(turn(q, cos, sin), *kv, mask))
        return out


class TextLayer(nn.Module):
    """One decoder layer: attention, MLP, and the token's own per-layer input."""

    def __init__(self, config: dict[str, Any], full: bool, shared: bool) -> None:
        super().__init__()
        hidden, own = config["hidden_size"], config["hidden_size_per_layer_input"]
        self.self_attn = TextAttention(config, full, shared)
        self.mlp = Mlp(hidden, config["intermediate_size"])
        self.input_layernorm = Norm(hidden)
        self.post_attention_layernorm = Norm(hidden, initial=0.5)
        self.pre_feedforward_layernorm = Norm(hidden)
        self.post_feedforward_layernorm = Norm(hidden, initial=0.5)
        self.per_layer_input_gate = linear(hidden, own)
        self.per_layer_projection = linear(own, hidden)
        self.post_per_layer_input_norm = Norm(hidden, initial=0.2)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(
        self,
        x: Tensor,
        own: Tensor,
        kv: tuple[Tensor, Tensor] | None,
        rope: tuple[Tensor, Tensor],
        mask: Mask,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        normed = self.input_layernorm(x)
        kv = kv or self.self_attn.keys_values(normed, *rope)
        x = x + self.post_attention_layernorm(self.self_attn(normed, kv, *rope, mask))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        gate = functional.gelu(self.per_layer_input_gate(x), approximate="tanh")
        x = x + self.post_per_layer_input_norm(self.per_layer_projection(gate * own))
        return x * self.layer_scalar.to(x.dtype), kv


class TextModel(nn.Module):
    """The language model, from embeddings to the last hidden states."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        hidden, own = config["hidden_size"], config["hidden_size_per_layer_input"]
        self.types: list[str] = config["layer_types"]
        count = len(self.types)
        self.first_shared = count - config["num_kv_shared_layers"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], hidden)
        self.embed_tokens_per_layer = nn.Embedding(config["vocab_size"], count * own)
        nn.init.normal_(self.embed_tokens.weight, std=hidden**-0.5)
        nn.init.normal_(self.embed_tokens_per_layer.weight, std=own**-0.5)
        self.per_layer_model_projection = linear(hidden, count * own)
        self.per_layer_projection_norm = Norm(own)
        self.layers = nn.ModuleList(
            TextLayer(config, kind == "full_attention", index >= self.first_shared)
            for index, kind in enumerate(self.types)
        )
        self.norm = Norm(hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        """`[B, L]` to `[B, L, hidden]`, scaled by the root of the width."""
        out: Tensor = self.embed_tokens(tokens) * self.config["hidden_size"] ** 0.5
        return out

    def per_layer(self, tokens: Tensor, embeds: Tensor) -> Tensor:
        """What each layer gets of each token: `[B, L, layers, own]`. Pictures count as padding."""
        own: int = self.config["hidden_size_per_layer_input"]
        identity = self.embed_tokens_per_layer(tokens) * own**0.5
        context = self.per_layer_model_projection(embeds) * self.config["hidden_size"] ** -0.5
        context = self.per_layer_projection_norm(context.unflatten(-1, (-1, own)))
        identity = identity.unflatten(-1, (-1, own)).to(context.dtype)
        out: Tensor = (context + identity) * 2.0**-0.5
        return out

    def rope(self, kind: str, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[B, 1, L, D / 2]`; a full layer turns only its first pairs."""
        full = kind == "full_attention"
        parameters = self.config["rope_parameters"][kind]
        size = self.config["global_head_dim" if full else "head_dim"]
        pairs = torch.arange(size // 2, device=positions.device, dtype=torch.float32)
        frequencies = parameters["rope_theta"] ** (-2.0 * pairs / size)
        turned = int(parameters.get("partial_rotary_factor", 1.0) * size // 2)
        frequencies = torch.where(pairs < turned, frequencies, 0.0)
        angles = positions[:, None, :, None].float() * frequencies
        return angles.cos(), angles.sin()

    def forward(
        self, tokens: Tensor, embeds: Tensor, positions: Tensor, masks: dict[str, Mask]
    ) -> Tensor:
        ropes = {}
        for kind in sorted(set(self.types)):
            cos, sin = self.rope(kind, positions)
            ropes[kind] = (cos.to(embeds.dtype), sin.to(embeds.dtype))
        own = self.per_layer(tokens, embeds)
        x, latest = embeds, dict[str, tuple[Tensor, Tensor]]()
        for index, (kind, layer) in enumerate(zip(self.types, self.layers, strict=True)):
            kv = latest[kind] if index >= self.first_shared else None
            x, latest[kind] = layer(x, own[:, :, index], kv, ropes[kind], masks[kind])
        out: Tensor = self.norm(x)
        return out


class VisionAttention(nn.Module):
    """Attention among the patches of one picture, turned by their column and row."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.head_dim: int = config["head_dim"]
        width = config["num_attention_heads"] * self.head_dim
        sharp = self.head_dim**-0.25
        self.q_proj = Wrapped(config["hidden_size"], width)
        self.k_proj = Wrapped(config["hidden_size"], width)
        self.v_proj = Wrapped(config["hidden_size"], width)
        self.o_proj = Wrapped(width, config["hidden_size"])
        self.q_norm = Norm(self.head_dim, initial=sharp)
        self.k_norm = Norm(self.head_dim, initial=sharp)
        self.v_norm = Norm(self.head_dim, with_scale=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            norm(projection(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
            for projection, norm in (
                (self.q_proj, self.q_norm),
                (self.k_proj, self.k_norm),
                (self.v_proj, self.v_norm),
            )
        )
        q, k = (
            torch.cat([turn(half, cos[i], sin[i]) for i, half in enumerate(t.chunk(2, -1))], -1)
            for t in (q, k)
        )
        out: Tensor = self.o_proj(attend(q, k, v, mask))
        return out


class VisionLayer(nn.Module):
    """One encoder layer of the vision tower."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.self_attn = VisionAttention(config)
        self.mlp = Mlp(hidden, config["intermediate_size"], wrapped=True)
        self.input_layernorm = Norm(hidden)
        self.post_attention_layernorm = Norm(hidden, initial=0.5)
        self.pre_feedforward_layernorm = Norm(hidden)
        self.post_feedforward_layernorm = Norm(hidden, initial=0.5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), cos, sin, mask)
        x = x + self.post_attention_layernorm(attended)
        out: Tensor = x + self.post_feedforward_layernorm(
            self.mlp(self.pre_feedforward_layernorm(x))
        )
        return out


class PatchEmbedder(nn.Module):
    """Pixels of a patch to a vector, plus learnt vectors for its column and its row."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.input_proj = linear(3 * config["patch_size"] ** 2, config["hidden_size"])
        table = torch.randn(2, config["position_embedding_size"], config["hidden_size"]) * 0.1
        self.position_embedding_table = nn.Parameter(table)

    def forward(self, patches: Tensor, positions: Tensor, padding: Tensor) -> Tensor:
        columns, rows = positions.clamp(min=0).unbind(-1)
        table = self.position_embedding_table
        place = functional.embedding(columns, table[0]) + functional.embedding(rows, table[1])
        embedded = self.input_proj(2 * (patches - 0.5))
        out: Tensor = embedded + place.masked_fill(padding[..., None], 0.0).to(embedded.dtype)
        return out


class VisionEncoder(nn.Module):
    """Holds the layers under the checkpoint's name."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(VisionLayer(config) for _ in range(config["num_hidden_layers"]))


class VisionTower(nn.Module):
    """Patches to soft tokens: `[I, P, pixels]` to `[I, P / pooling**2, hidden]`."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.patch_embedder = PatchEmbedder(config)
        self.encoder = VisionEncoder(config)

    def forward(self, patches: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
        padding = (positions == -1).all(-1)
        x = self.patch_embedder(patches.to(dtype), positions, padding)
        quarter = self.config["head_dim"] // 4
        steps = torch.arange(quarter, device=positions.device, dtype=torch.float32)
        frequencies = self.config["rope_parameters"]["rope_theta"] ** (-steps / quarter)
        angles = positions.float().movedim(-1, 0)[:, :, None, :, None] * frequencies
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        mask = ~padding[:, None, None, :]
        for layer in self.encoder.layers:
            x = layer(x, cos, sin, mask)
        return self.pool(x, positions, padding)

    def pool(self, x: Tensor, positions: Tensor, padding: Tensor) -> Tensor:
        """Mean of each square of patches, scaled by the root of the width."""
        side: int = self.config["pooling_kernel_size"]
        cell = positions.clamp(min=0) // side
        wide = (positions[..., 0].amax(-1, keepdim=True) + 1) // side
        index = cell[..., 0] + wide * cell[..., 1]
        count = x.shape[1] // side**2
        squares = torch.arange(count, device=x.device)
        weights = (index[:, None, :] == squares[:, None]) & ~padding[:, None, :]
        pooled = weights.to(x.dtype) @ x / side**2
        out: Tensor = pooled * self.config["hidden_size"] ** 0.5
        return out


class AudioTower(Gemma4AudioModel):
    """Frames to soft tokens, `[S, F, bins]` to `[S, F / 4, hidden]`: transformers' own module."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(Gemma4AudioConfig(**config))
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                fan_in = parameter[0].numel()
                nn.init.normal_(parameter, std=fan_in**-0.5)
            elif name.endswith(("norm_post_attn.weight", "post_layer_norm.weight")):
                nn.init.constant_(parameter, 0.5)

    @torch.compiler.disable
    def soft(self, frames: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
        """Soft tokens; those of padding mean nothing."""
        known = torch.arange(frames.shape[1], device=frames.device) < counts[:, None]
        out: Tensor = self(frames.float(), known).last_hidden_state.to(dtype)
        return out


class Projector(nn.Module):
    """Soft tokens of a tower to embeddings of the language model."""

    def __init__(self, tower: int, text: int) -> None:
        super().__init__()
        self.embedding_projection = linear(tower, text)
        self.embedding_pre_projection_norm = Norm(tower, with_scale=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.embedding_projection(self.embedding_pre_projection_norm(x))
        return out


class Multimodal(nn.Module):
    """Holds the parts under the checkpoint's names."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        text, vision, audio = (config[f"{part}_config"] for part in ("text", "vision", "audio"))
        self.language_model = TextModel(text)
        self.vision_tower = VisionTower(vision)
        self.embed_vision = Projector(vision["hidden_size"], text["hidden_size"])
        self.audio_tower = AudioTower(audio)
        self.embed_audio = Projector(audio["output_proj_dims"], text["hidden_size"])


class Gemma4(nn.Module):
    """The whole model, from a packed batch to the logits of its answers."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.model = Multimodal(config)

    def hidden(self, batch: Batch, masks: dict[str, Mask], dtype: torch.dtype) -> Tensor:
        """Last hidden states `[B, L, hidden]`."""
        language = self.model.language_model
        seen = self.model.vision_tower(batch.patches.to(dtype) / 255, batch.patch_positions, dtype)
        heard = self.model.audio_tower.soft(batch.frames, batch.frame_counts, dtype)
        rows = (self.model.embed_vision(seen), self.model.embed_audio(heard))
        soft = torch.cat([media.flatten(0, 1).to(dtype) for media in rows])
        is_soft = batch.soft_tokens >= 0
        words = batch.tokens.masked_fill(is_soft, self.config["text_config"]["pad_token_id"])
        embeds = language.embed(words).to(dtype)
        embeds = torch.where(is_soft[..., None], soft[batch.soft_tokens.clamp(min=0)], embeds)
        out: Tensor = language(words, embeds, batch.positions, masks)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Soft-capped logits in float32."""
        cap: float = self.config["text_config"]["final_logit_softcapping"]
        raw = functional.linear(
            hidden, self.model.language_model.embed_tokens.weight.to(hidden.dtype)
        )
        return cap * torch.tanh(raw.float() / cap)

    def forward(
        self, batch: Batch, masks: dict[str, Mask], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Mean loss over the answers' tokens, and the share of them that is predicted right."""
        chosen = self.hidden(batch, masks, dtype).flatten(0, 1)[batch.answer_at]
        logits = self.logits(chosen)
        loss = functional.cross_entropy(logits, batch.answer, ignore_index=-100)
        known = batch.answer != -100
        right = ((logits.argmax(-1) == batch.answer) & known).sum() / known.sum()
        return loss, right
