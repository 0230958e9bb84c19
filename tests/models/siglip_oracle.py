"""References for families with SigLIP's encoder, of transformers or made of parts that it has."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen
from transformers.models.siglip2 import modeling_siglip2 as siglip2

from quire.core.media import CLIP_COLOURS, MediaItem, PlacedMedia
from tests.models.oracle import draw_anew, save_random
from tests.support.seeing import PATCH


@dataclass(frozen=True)
class Reference:
    """A decoder, and what makes a picture's rows.

    Attributes:
        rows: of one picture, `[rows, hidden]`.
    """

    text: Any
    rows: Callable[[MediaItem], torch.Tensor]

    def embeddings(self, tokens: Sequence[int], media: Sequence[PlacedMedia]) -> torch.Tensor:
        """Return embeddings `[1, tokens, hidden]`, with pictures in their places."""
        with torch.no_grad():
            embedded: torch.Tensor = self.text.get_input_embeddings()(torch.tensor([tokens]))
            for each in media:
                embedded[0, each.start : each.end] = self.rows(each.item)
        return embedded


def youtu_vl(config: dict[str, Any], folder: Path) -> Reference:
    """Return Youtu's decoder, and Qwen2.5-VL's encoder with SigLIP's layers. Saved by published
    names.
    """
    torch.manual_seed(0)
    text = _decoder(config, "youtu")
    vision = config["vision_config"]
    tower = qwen.Qwen2_5_VisionTransformerPretrainedModel(
        transformers.Qwen2_5_VLConfig(
            vision_config={
                **{key: value for key, value in vision.items() if key != "model_type"},
                "depth": vision["num_hidden_layers"],
                "num_heads": vision["num_attention_heads"],
            }
        ).vision_config
    )
    layers = transformers.Siglip2VisionConfig(**vision)
    hidden = layers.hidden_size
    tower.patch_embed = nn.Linear(3 * PATCH**2, hidden)
    for block in tower.blocks:
        block.norm1, block.norm2 = nn.LayerNorm(hidden, 1e-6), nn.LayerNorm(hidden, 1e-6)
        block.mlp = siglip2.Siglip2MLP(layers)
    tower.merger = nn.Sequential(nn.LayerNorm(hidden, 1e-6), tower.merger)
    draw_anew(tower)
    _save(config, folder, text, _youtu_names(tower))

    def rows(item: MediaItem) -> torch.Tensor:
        with torch.no_grad():
            grid = torch.tensor([(1, *item.shape)])
            found: torch.Tensor = tower(_pixels(item), grid_thw=grid).pooler_output
        return found

    return Reference(text, rows)


def phi4_siglip(config: dict[str, Any], folder: Path) -> Reference:
    """Return Phi 4's decoder and SigLIP 2's encoder. Saved by published names."""
    torch.manual_seed(0)
    text = _decoder(config, "phi3")
    layers = transformers.Siglip2VisionConfig(**config["vision_config"])
    layers._attn_implementation = "eager"
    tower = siglip2.Siglip2VisionModel(layers)
    projector = nn.Sequential(
        nn.Linear(layers.hidden_size, config["hidden_size"]),
        nn.GELU(),
        nn.Linear(config["hidden_size"], config["hidden_size"]),
    )
    for module in (tower, projector):
        draw_anew(module)
    prefix = "model.vision_tower.vision_tower.vision_model."
    vision = {prefix + name: array for name, array in tower.state_dict().items()}
    for name, array in projector.state_dict().items():
        vision[f"model.mm_projector.{name}"] = array
    _save(config, folder, text, vision)

    def rows(item: MediaItem) -> torch.Tensor:
        pixels, shape = _pixels(item)[None], torch.tensor([item.shape])
        seen = torch.ones(pixels.shape[:2], dtype=torch.long)
        with torch.no_grad():
            states = tower(pixels, seen, shape, output_hidden_states=True).hidden_states
            assert len(states) == 1 + layers.num_hidden_layers
            found: torch.Tensor = projector(states[-2][0])
        return found

    return Reference(text, rows)


def lfm2_vl(config: dict[str, Any], folder: Path) -> Reference:
    """Return the reference: all of it is in transformers."""
    whole = save_random(transformers.AutoConfig.for_model(**deepcopy(config)), folder)

    def rows(item: MediaItem) -> torch.Tensor:
        down, across = item.shape
        squares = _pixels(item).reshape(down // 2, across // 2, 2, 2, -1).swapaxes(1, 2)
        pixels = squares.reshape(1, down * across, -1)  # patches row by row
        with torch.no_grad():
            found = whole.get_image_features(
                pixels,
                spatial_shapes=torch.tensor([item.shape]),
                pixel_attention_mask=torch.ones(pixels.shape[:2], dtype=torch.long),
            )
        (picture,) = found.pooler_output
        return torch.as_tensor(picture)

    return Reference(whole, rows)


def lfm3_vl(config: dict[str, Any], folder: Path) -> Reference:
    """Return the reference: all of it is in transformers."""
    whole = save_random(transformers.AutoConfig.for_model(**deepcopy(config)), folder)

    def rows(item: MediaItem) -> torch.Tensor:
        still = item.kind == "image"
        grid = (1, *item.shape) if still else item.shape[:3]
        raw = np.frombuffer(item.features, np.uint8)
        frames = raw.reshape(int(np.prod(grid)), 1 if still else 2, PATCH, PATCH, 3)
        frames = np.repeat(frames, 3 - frames.shape[1], axis=1).transpose(0, 4, 1, 2, 3)
        pixels = torch.from_numpy((frames / 127.5 - 1).astype(np.float32).reshape(len(frames), -1))
        with torch.no_grad():
            parts = whole.get_image_features(pixels, torch.tensor([grid])).pooler_output
        return torch.cat(list(parts))

    return Reference(whole, rows)


def kimi_k25(config: dict[str, Any], folder: Path) -> Reference:
    """Return the reference: all of it is in transformers, which saves all but two parts by
    published names.
    """
    whole = save_random(transformers.AutoConfig.for_model(**deepcopy(config)), folder)

    def rows(item: MediaItem) -> torch.Tensor:
        down, across = item.shape
        squares = _pixels(item).reshape(down // 2, across // 2, 2, 2, -1).swapaxes(1, 2)
        pixels = squares.reshape(down * across, PATCH, PATCH, 3).permute(0, 3, 1, 2)
        grid = torch.tensor([(1, *item.shape)])
        with torch.no_grad():
            found = whole.model.get_image_features(pixels, image_grid_thw=grid)
        (picture,) = found.pooler_output
        return torch.as_tensor(picture)

    return Reference(whole, rows)


def kimi_vl(config: dict[str, Any], folder: Path) -> Reference:
    """Return Kimi K2.5's reference, which has the same encoder of pictures. Saved by published
    names.
    """
    vision = dict(config["vision_config"])
    for side in ("height", "width"):
        vision[f"pos_emb_{side}"] = vision.pop(f"init_pos_emb_{side}")
    del vision["model_type"], vision["merge_kernel_size"]
    own = {key: value for key, value in config.items() if key != "media_placeholder_token_id"}
    changes = {"model_type": "kimi_k25", "vision_config": vision, "projection_hidden_size": 64}
    found = kimi_k25(own | changes | {"image_token_id": config[_KIMI_TOKEN]}, folder)
    path = folder / "model.safetensors"
    saved = {_kimi_name(name): array for name, array in load_file(path).items()}
    save_file(saved, path)
    (folder / "config.json").write_text(json.dumps(config))
    return found


_KIMI_TOKEN = "media_placeholder_token_id"


def _kimi_name(name: str) -> str:
    """Return the name in Kimi-VL of a tensor of K2.5."""
    for theirs, published in (
        ("mm_projector.proj.0.", "multi_modal_projector.linear_1."),
        ("mm_projector.proj.2.", "multi_modal_projector.linear_2."),
        ("mm_projector.", "multi_modal_projector."),
    ):
        name = name.replace(theirs, published)
    return name


def dots_ocr(config: dict[str, Any], folder: Path) -> Reference:
    """Return Qwen2, and Qwen2.5-VL's encoder without windows and biases, with a norm behind its
    patches and another behind its layers. Saved by published names.
    """
    torch.manual_seed(0)
    text = _decoder({k: v for k, v in config.items() if k != "attention_bias"}, "qwen2")
    vision = config["vision_config"]
    hidden, count = vision["embed_dim"], vision["num_hidden_layers"]
    tower = qwen.Qwen2_5_VisionTransformerPretrainedModel(
        transformers.Qwen2_5_VLConfig(
            vision_config={
                **vision,
                "depth": count,
                "num_heads": vision["num_attention_heads"],
                "out_hidden_size": config["hidden_size"],
                "fullatt_block_indexes": list(range(count)),
            }
        ).vision_config
    )

    def norm() -> nn.Module:
        return nn.RMSNorm(hidden, vision["rms_norm_eps"])

    tower.patch_embed = nn.Sequential(nn.Linear(3 * PATCH**2, hidden), norm())
    for block in tower.blocks:
        block.norm1, block.norm2 = norm(), norm()
        for module in block.modules():
            if isinstance(module, nn.Linear):
                module.bias = None
    tower.merger.ln_q = nn.LayerNorm(hidden, 1e-6)
    tower.merger = nn.Sequential(norm(), tower.merger)
    draw_anew(tower)
    named = {f"vision_tower.{_dots_name(n)}": each for n, each in tower.state_dict().items()}
    kernel = "vision_tower.patch_embed.patchifier.proj.weight"
    # Here the values of a pixel stand together; a convolution has planes of colours.
    named[kernel] = named[kernel].reshape(hidden, PATCH, PATCH, 3).permute(0, 3, 1, 2)
    _save(config, folder, text, named)

    def rows(item: MediaItem) -> torch.Tensor:
        mean, std = (np.array(each) for each in (CLIP_COLOURS.mean, CLIP_COLOURS.std))
        raw = np.frombuffer(item.features, np.uint8).reshape(-1, 3)
        pixels = ((raw / 255 - mean) / std).astype(np.float32)
        values = torch.from_numpy(pixels.reshape(item.shape[0] * item.shape[1], -1))
        with torch.no_grad():
            grid = torch.tensor([(1, *item.shape)])
            found: torch.Tensor = tower(values, grid_thw=grid).pooler_output
        return found

    return Reference(text, rows)


_DOTS = {
    "patch_embed.0.": "patch_embed.patchifier.proj.",
    "patch_embed.1.": "patch_embed.patchifier.norm.",
    "mlp.gate_proj.": "mlp.fc1.",
    "mlp.down_proj.": "mlp.fc2.",
    "mlp.up_proj.": "mlp.fc3.",
    "merger.0.": "post_trunk_norm.",
    "merger.1.": "merger.",
}


def _dots_name(name: str) -> str:
    """Return the published name of a tensor of the encoder."""
    for theirs, published in _DOTS.items():
        name = name.replace(theirs, published)
    return name


def mistral3(config: dict[str, Any], folder: Path) -> Reference:
    """Return the reference: all of it is in transformers; tokens stand between the lines of a
    picture.
    """
    whole = save_random(transformers.AutoConfig.for_model(**deepcopy(config)), folder)
    merge = config.get("spatial_merge_size", 1)

    def rows(item: MediaItem) -> torch.Tensor:
        down = item.shape[0] // merge
        with torch.no_grad():
            ends = whole.get_input_embeddings()(torch.tensor([12] * (down - 1) + [13]))
        lines = _by_pixtral(whole, item, merge).reshape(down, item.shape[1] // merge, -1)
        return torch.cat([lines, ends[:, None]], dim=1).flatten(0, 1)

    return Reference(whole, rows)


llava = mistral3


def lighton_ocr(config: dict[str, Any], folder: Path) -> Reference:
    """Return the reference: all of it is in transformers."""
    whole = save_random(transformers.AutoConfig.for_model(**deepcopy(config)), folder)
    return Reference(whole, lambda item: _by_pixtral(whole, item))


def _by_pixtral(whole: Any, item: MediaItem, merge: int = 2) -> torch.Tensor:
    """Return the rows of a picture's squares, `[rows, hidden]`."""
    patch = 2 * PATCH // merge
    mean, std = (np.array(each) for each in (CLIP_COLOURS.mean, CLIP_COLOURS.std))
    down, across = (side // merge for side in item.shape)
    raw = np.frombuffer(item.features, np.uint8)
    squares = raw.reshape(down, across, merge, merge, patch, patch, 3).transpose(
        0, 2, 4, 1, 3, 5, 6
    )
    height, width = (merge * side * patch for side in (down, across))
    pixels = (squares.reshape(1, height, width, 3) / 255 - mean) / std
    values = torch.from_numpy(pixels.transpose(0, 3, 1, 2).astype(np.float32))
    with torch.no_grad():
        found = whole.get_image_features(values, image_sizes=torch.tensor([[height, width]]))
    return torch.as_tensor(found.pooler_output[0])


def minicpmv4_6(config: dict[str, Any], folder: Path) -> Reference:
    """Return the reference: all of it is in transformers."""
    whole = save_random(transformers.AutoConfig.for_model(**deepcopy(config)), folder)
    side, patch = 2 if "downsample_mode" in config else 4, config["vision_config"]["patch_size"]

    def rows(item: MediaItem) -> torch.Tensor:
        down, across = item.shape
        squares = _pixels(item).reshape(down // side, across // side, side, side, -1)
        lines = squares.swapaxes(1, 2).reshape(down * across, patch, patch, 3)
        pixels = lines.permute(3, 1, 0, 2).reshape(1, 3, patch, -1)
        with torch.no_grad():
            found = whole.model.get_image_features(pixels, torch.tensor([item.shape]))
        (picture,) = found.pooler_output
        return torch.as_tensor(picture)

    return Reference(whole, rows)


def _decoder(config: dict[str, Any], model_type: str) -> Any:
    keys = {key: value for key, value in deepcopy(config).items() if key != "vision_config"}
    own = transformers.AutoConfig.for_model(**keys | {"model_type": model_type})
    text = transformers.AutoModelForCausalLM.from_config(own, attn_implementation="eager")
    draw_anew(text)
    return text.float().eval()


def _pixels(item: MediaItem) -> torch.Tensor:
    """Return pixels as `[patches, values]`, pixel by pixel."""
    raw = np.frombuffer(item.features, np.uint8).reshape(item.shape[0] * item.shape[1], -1)
    return torch.from_numpy((raw / 127.5 - 1).astype(np.float32))


def _save(config: dict[str, Any], folder: Path, text: Any, vision: dict[str, torch.Tensor]) -> None:
    text.save_pretrained(folder)
    saved = {name: array for name, array in text.state_dict().items() if "lm_head" not in name}
    if not config["tie_word_embeddings"]:
        saved["lm_head.weight"] = text.lm_head.weight
    contiguous = {name: array.contiguous() for name, array in (saved | vision).items()}
    save_file(contiguous, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


_YOUTU = {
    "patch_embed.": "embeddings.patch_embedding.",
    "blocks.": "encoder.layers.",
    ".norm": ".layer_norm",
    ".attn.proj.": ".self_attn.out_proj.",
    "merger.0.": "post_layernorm.",
}


def _youtu_names(tower: nn.Module) -> dict[str, torch.Tensor]:
    """Return the encoder's tensors as Tencent publishes them."""
    named: dict[str, torch.Tensor] = {}
    for name, array in tower.state_dict().items():
        if name.startswith("merger.1."):
            named["merger." + name.removeprefix("merger.1.")] = array
            continue
        for theirs, published in _YOUTU.items():
            name = name.replace(theirs, published)
        name = f"siglip2.vision_model.{name}"
        if ".attn.qkv." in name:
            for part, rows in zip("qkv", array.chunk(3), strict=True):
                named[name.replace("attn.qkv", f"self_attn.{part}_proj")] = rows
        else:
            named[name] = array
    return named
