"""vLLM on the shape of a model folder, with random weights, for `systems.py`. Needs no Quire.

The folder's `config.json` is all that is read. Affine weights of 4 bits are in AWQ's layout.
"""

from __future__ import annotations

import importlib.machinery
import json
import math
import os
import sys
import tempfile
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from loads import AROUND, Answered, Asked, Row
from systems import picture

_SETTINGS = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_PLUGINS": "",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
_UNPACKED = ["lm_head", "router", "mlp.gate", "vision_tower", "embed_vision"]
"""Parts of names of matrices that stay in bfloat16, as in published AWQ models."""
_AROUND_EXPERTS = ["lm_head", "model.embed_tokens", "model.layers.*.self_attn"]
_AROUND_EXPERTS += ["model.layers.*.mlp.router"]
"""What is not in MXFP4, as gpt-oss names it."""
_GROUP, _FP8_BLOCK, _MXFP4_GROUP = 64, 128, 32
_PICTURE_ROWS = 280
"""Most rows of a picture, as published configurations of Gemma 4 have it."""
_AFTER_LAYERS = 0.1
"""Weight of norms behind layers, as `shapes.py` has it."""
_MOST_TOKENS = 24_000
"""Tokens of a sequence: the longest prompt of the loads, and its answer."""


class VLLM:
    """vLLM's engine in this process, with its prefix cache."""

    caches_prefixes = True

    def __init__(self, folder: Path, kv_gigabytes: int, most_streams: int) -> None:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        _stand_in_for_numba()
        import torch
        import vllm
        from vllm import LLM
        from vllm.model_executor.model_loader import dummy_loader

        def fill(loader: Any, model: Any, model_config: Any) -> None:
            fill_at_random(model)

        dummy_loader.DummyModelLoader.load_weights = fill
        config = vllm_config(json.loads((folder / "config.json").read_text()))
        self.sees = "vision_config" in config
        self._image = config.get("image_token_id")
        own = Path(tempfile.mkdtemp(prefix="shape-"))
        (own / "config.json").write_text(json.dumps(config, indent=1))
        if self.sees:
            write_processor(own, config)
        text = config.get("text_config", config)
        gemma = {"hf_overrides": _with_head_sizes(text)} if "global_head_dim" in text else {}
        self._engine = LLM(
            model=str(own),
            load_format="dummy",
            skip_tokenizer_init=not self.sees,
            dtype="bfloat16",
            max_model_len=_MOST_TOKENS,
            kv_cache_memory_bytes=kv_gigabytes << 30,
            enable_prefix_caching=True,
            disable_log_stats=True,
            max_num_seqs=max(64, most_streams),
            generation_config="vllm",
            **gemma,
        ).llm_engine
        self.about: Row = {"version": vllm.__version__, "torch": torch.__version__}
        self.about["device"] = torch.cuda.get_device_name()

    def prepare(self, asked: Asked) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0,
            ignore_eos=True,
            max_tokens=asked.max_tokens,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": list(asked.prompt)}
        if asked.picture is not None:
            tokens = [*asked.prompt[:AROUND], self._image, *asked.prompt[AROUND:]]
            seen = {"image": picture(asked.picture)}
            prompt = {"prompt_token_ids": tokens, "multi_modal_data": seen}
        return asked.name, prompt, sampling

    def add(self, prepared: Any) -> None:
        self._engine.add_request(*prepared)

    def step(self) -> Iterable[Answered]:
        return [
            Answered(each.request_id, list(each.outputs[0].token_ids), each.finished)
            for each in self._engine.step()
        ]


def vllm_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a folder as vLLM reads it: MLX's affine codes of 4 bits become
    AWQ's.
    """
    packed = config.get("quantization")
    found = {name: value for name, value in config.items() if name != "quantization"}
    found |= {"dtype": "bfloat16", "torch_dtype": "bfloat16", "bos_token_id": 0}
    if "vision_config" in found:
        found["vision_config"] = {**found["vision_config"], "default_output_length": _PICTURE_ROWS}
    if packed and packed.get("mode") == "mxfp4":
        found["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": _AROUND_EXPERTS,
        }
    elif packed:
        found["quantization_config"] = {
            "quant_method": "awq",
            "bits": 4,
            "group_size": _GROUP,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": _UNPACKED,
        }
    return found


def fill_at_random(model: Any) -> None:
    """Draw a model's parameters in sizes that keep activations near 1, so that routers spread
    tokens over experts.

    AWQ's zero points are 7 or 8 at random. The mean of 16 equally frequent codes is 7.5: with 8
    alone all matrices share a part that grows from layer to layer, until all streams write the same
    token and use the same experts.
    """
    import torch

    seen: set[int] = set()
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        data, last = parameter.data, name.rsplit(".", 1)[-1]
        if data.data_ptr() in seen or data.device.type == "meta":
            continue
        seen.add(data.data_ptr())
        draw = torch.Generator(device=data.device)
        draw.manual_seed(seed)
        if data.element_size() == 1 and data.is_floating_point():  # FP8, which torch cannot draw
            drawn = torch.empty(data.shape, dtype=torch.bfloat16, device=data.device)
            data.copy_(drawn.normal_(0, 64, generator=draw).to(data.dtype))
        elif data.dtype == torch.uint8 and "scale" in last:  # exponents of MXFP4
            data.fill_(127 - round(math.log2(2.9 * math.sqrt(data.shape[-1] * _MXFP4_GROUP))))
        elif data.dtype == torch.uint8:
            data.random_(0, 256, generator=draw)
        elif "weight_scale" in last:
            data.fill_(1 / (64 * math.sqrt(data.shape[-1] * _FP8_BLOCK)))
        elif not data.is_floating_point():
            if "qzeros" in last:
                data.random_(-(2**31), 2**31 - 1, generator=draw)
                data.bitwise_and_(0x11111111).add_(0x77777777)  # int32 wraps around
            elif "qweight" in last or "weight_packed" in last:
                data.random_(-(2**31), 2**31 - 1, generator=draw)
        elif "scales" in last:
            data.fill_(1 / (4.6 * math.sqrt(data.shape[-2] * _GROUP)))
        elif data.ndim >= 2:
            data.normal_(0, 1 / math.sqrt(data.shape[-1]), generator=draw)
        elif "post_" in name:
            data.fill_(_AFTER_LAYERS)
        else:
            data.fill_(float("norm" in name or "scale" in last or "scalar" in last))


def write_processor(folder: Path, config: dict[str, Any]) -> None:
    """Write a tokenizer of made-up words and Gemma 4's processor of pictures."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    marks = {
        config["boi_token_id"]: "<|image>",
        config["image_token_id"]: "<|image|>",
        config["eoi_token_id"]: "<image|>",
        config["video_token_id"]: "<|video|>",
        config["audio_token_id"]: "<|audio|>",
        config["boa_token_id"]: "<|audio>",
        config["eoa_token_index"]: "<audio|>",
    }
    size = config["text_config"]["vocab_size"]
    words = {marks.get(number, f"w{number}"): number for number in range(size)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w3")),
        unk_token="w3",
        pad_token="w0",
        eos_token="w1",
        bos_token="w2",
        additional_special_tokens=list(marks.values()),
        extra_special_tokens={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
    )
    tokenizer.save_pretrained(folder)
    pictures = {"patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 280}
    kinds = {
        "image_processor": {"image_processor_type": "Gemma4ImageProcessor", **pictures},
        "video_processor": {"video_processor_type": "Gemma4VideoProcessor", **pictures},
        "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
    }
    kinds["video_processor"]["max_soft_tokens"] = 70
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": "Gemma4Processor", **kinds}, indent=1)
    )
    (folder / "preprocessor_config.json").write_text(json.dumps(kinds["image_processor"]))


def _with_head_sizes(text: dict[str, Any]) -> Any:
    """Return a function that gives vLLM 0.26 Gemma 4's two head sizes: transformers 5.17 keeps them
    layer by layer.
    """

    def overridden(config: Any) -> Any:
        own = getattr(config, "text_config", config)
        own.per_layer_config = None
        own.global_head_dim = text["global_head_dim"]
        own.num_global_key_value_heads = text["num_global_key_value_heads"]
        return config

    return overridden


def _stand_in_for_numba() -> None:
    """Replace numba, which n-gram speculation alone needs, where it refuses this NumPy."""
    try:
        import numba  # noqa: F401
    except Exception as error:  # ImportError and others
        print("numba left out:", error, file=sys.stderr)
    else:
        return
    for name in [each for each in sys.modules if each.split(".")[0] == "numba"]:
        del sys.modules[name]

    def same(*arguments: Any, **options: Any) -> Any:
        if len(arguments) == 1 and callable(arguments[0]) and not options:
            return arguments[0]
        return lambda function: function

    module: Any = types.ModuleType("numba")
    module.jit = module.njit = module.vectorize = same
    module.prange, module.get_num_threads = range, lambda: 1
    module.set_num_threads = lambda count: None
    module.__spec__ = importlib.machinery.ModuleSpec("numba", None)
    module.__version__ = "0"
    sys.modules["numba"] = module
