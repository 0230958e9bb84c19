"""Processors turn a file's bytes into an encoder's input. This module holds the tables of
`media.kinds`.

A new processor of a known kind is one line here, under the name that model folders give it, or
under the `model_type` if their settings name none.
"""

from __future__ import annotations

from quire.media.kinds import Open
from quire.media.processors.cohere import CohereImageProcessor
from quire.media.processors.deepseek import DeepseekImageProcessor, HybridImageProcessor
from quire.media.processors.deepseek_ocr import OcrImageProcessor
from quire.media.processors.dynamic import InternVLVideoProcessor, open_dynamic
from quire.media.processors.ernie_video import ErnieVideoProcessor
from quire.media.processors.falcon import FalconImageProcessor, PerceptionImageProcessor
from quire.media.processors.gemma3n import Gemma3nAudioProcessor
from quire.media.processors.gemma3n_pictures import open_siglip
from quire.media.processors.gemma4 import Gemma4ImageProcessor, Gemma4VideoProcessor
from quire.media.processors.gemma4_audio import Gemma4AudioProcessor, Gemma4UnifiedAudioProcessor
from quire.media.processors.glm_video import Glm46VideoProcessor, GlmVideoProcessor
from quire.media.processors.hunyuan import HunyuanImageProcessor
from quire.media.processors.idefics import IdeficsImageProcessor
from quire.media.processors.kimi import KimiImageProcessor
from quire.media.processors.lfm import LfmImageProcessor
from quire.media.processors.llama import LlamaImageProcessor
from quire.media.processors.llama4 import Llama4ImageProcessor
from quire.media.processors.llava import (
    LlavaImageProcessor,
    LlavaNextImageProcessor,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionVideoProcessor,
)
from quire.media.processors.minicpm import MiniCpmImageProcessor, MiniCpmVideoProcessor
from quire.media.processors.moondream import MoondreamImageProcessor, open_moondream2
from quire.media.processors.original import open_ernie, open_internvl_chat, open_multi_modality
from quire.media.processors.pixtral import open_pixtral
from quire.media.processors.qwen import (
    ErnieImageProcessor,
    GlmImageProcessor,
    PaddleImageProcessor,
    QwenImageProcessor,
)
from quire.media.processors.qwen_audio import QwenAudioProcessor
from quire.media.processors.qwen_omni import open_video, open_video_beside_pictures
from quire.media.processors.qwen_video import Qwen3VideoProcessor, QwenVideoProcessor
from quire.media.processors.siglip import open_siglip2
from quire.media.processors.tiles import Gemma3ImageProcessor
from quire.media.processors.whisper import WhisperAudioProcessor

IMAGES: dict[str, Open] = {
    "DeepseekVLImageProcessor": DeepseekImageProcessor.open,
    "DeepseekVLImageProcessorFast": DeepseekImageProcessor.open,
    "DeepseekVLImageProcessorPil": DeepseekImageProcessor.open,
    "DeepseekVLHybridImageProcessor": HybridImageProcessor.open,
    "DeepseekVLHybridImageProcessorFast": HybridImageProcessor.open,
    "DeepseekVLHybridImageProcessorPil": HybridImageProcessor.open,
    "VLMImageProcessor": open_multi_modality,
    "internvl_chat": open_internvl_chat,
    **dict.fromkeys(
        (
            f"{name}ImageProcessor{backend}"
            for name in ("Idefics3", "SmolVLM")
            for backend in ("", "Fast", "Pil")
        ),
        IdeficsImageProcessor.open,
    ),
    "Kimi_K25ImageProcessor": KimiImageProcessor.open,
    "KimiK25VisionProcessor": KimiImageProcessor.open,
    "kimi_k25": KimiImageProcessor.open,
    "KimiVLImageProcessor": KimiImageProcessor.open,
    "kimi_vl": KimiImageProcessor.open,
    "Lfm2VlImageProcessor": LfmImageProcessor.open,
    "Lfm2VlImageProcessorFast": LfmImageProcessor.open,
    "lfm2_vl": LfmImageProcessor.open,
    "lfm2-vl": LfmImageProcessor.open,
    **dict.fromkeys(
        ("minicpmv4_6", *(f"MiniCPMV4_6ImageProcessor{end}" for end in ("", "Fast", "Pil"))),
        MiniCpmImageProcessor.open,
    ),
    "Gemma3ImageProcessor": Gemma3ImageProcessor.open,
    "Gemma3ImageProcessorFast": Gemma3ImageProcessor.open,
    "Cohere2VisionImageProcessor": CohereImageProcessor.open,
    "Cohere2VisionImageProcessorFast": CohereImageProcessor.open,
    "GotOcr2ImageProcessor": open_dynamic,
    "GotOcr2ImageProcessorFast": open_dynamic,
    "CLIPImageProcessor": LlavaImageProcessor.open,
    "CLIPImageProcessorFast": LlavaImageProcessor.open,
    "SiglipImageProcessor": open_siglip,
    "SiglipImageProcessorFast": open_siglip,
    "SiglipImageProcessorPil": open_siglip,
    "LlavaImageProcessor": LlavaImageProcessor.open,
    "LlavaImageProcessorFast": LlavaImageProcessor.open,
    "LlavaNextImageProcessor": LlavaNextImageProcessor.open,
    "LlavaNextImageProcessorFast": LlavaNextImageProcessor.open,
    "LlavaOnevisionImageProcessor": LlavaOnevisionImageProcessor.open,
    "LlavaOnevisionImageProcessorFast": LlavaOnevisionImageProcessor.open,
    "Gemma4ImageProcessor": Gemma4ImageProcessor.open,
    "Gemma4ImageProcessorFast": Gemma4ImageProcessor.open,
    "Gemma4ImageProcessorPil": Gemma4ImageProcessor.open,
    "Gemma4UnifiedImageProcessor": Gemma4ImageProcessor.open,
    "Gemma4UnifiedImageProcessorFast": Gemma4ImageProcessor.open,
    "Qwen2VLImageProcessor": QwenImageProcessor.open,
    "Qwen2VLImageProcessorFast": QwenImageProcessor.open,
    "Qwen2VLImageProcessorPil": QwenImageProcessor.open,
    "Qwen2_5_VLImageProcessor": QwenImageProcessor.open,
    "HunYuanVLImageProcessor": HunyuanImageProcessor.open,
    "HunYuanVLImageProcessorFast": HunyuanImageProcessor.open,
    "HunYuanVLImageProcessorPil": HunyuanImageProcessor.open,
    "Siglip2ImageProcessor": open_siglip2,
    "Siglip2ImageProcessorFast": open_siglip2,
    "Siglip2ImageProcessorNoUpscale": open_siglip2,
    "Siglip2ImageProcessorPil": open_siglip2,
    "PixtralImageProcessor": open_pixtral,
    "PixtralImageProcessorFast": open_pixtral,
    "PixtralImageProcessorPil": open_pixtral,
    "Llama4ImageProcessor": Llama4ImageProcessor.open,
    "Llama4ImageProcessorFast": Llama4ImageProcessor.open,
    "MllamaImageProcessor": LlamaImageProcessor.open,
    "MllamaImageProcessorFast": LlamaImageProcessor.open,
    "MllamaImageProcessorPil": LlamaImageProcessor.open,
    "Ernie4_5_VLImageProcessor": open_ernie,
    "Ernie4_5_VL_MoeImageProcessor": ErnieImageProcessor.open,
    "Ernie4_5_VL_MoeImageProcessorFast": ErnieImageProcessor.open,
    "Ernie4_5_VLMoeImageProcessor": ErnieImageProcessor.open,
    "Ernie4_5_VLMoeImageProcessorFast": ErnieImageProcessor.open,
    "PaddleOCRVLImageProcessor": PaddleImageProcessor.open,
    "PaddleOCRVLImageProcessorFast": PaddleImageProcessor.open,
    "Glm4vImageProcessor": GlmImageProcessor.open,
    "Glm4vImageProcessorFast": GlmImageProcessor.open,
    "Glm46VImageProcessor": GlmImageProcessor.open,
    "Glm46VImageProcessorFast": GlmImageProcessor.open,
}
# Processors by `model_type`, for models that describe pictures only in `config.json`.
IMAGES_BY_MODEL: dict[str, Open] = {
    **dict.fromkeys(
        ("deepseek_ocr2", "deepseek_vl_v2", "deepseekocr", "deepseekocr_2"), OcrImageProcessor.open
    ),
    "falcon_ocr": FalconImageProcessor.open,
    "falcon_perception": PerceptionImageProcessor.open,
    "moondream1": open_moondream2,
    "moondream2": open_moondream2,
    "moondream3": MoondreamImageProcessor.open,
}
SOUNDS: dict[str, Open] = {
    "Gemma3nAudioFeatureExtractor": Gemma3nAudioProcessor.open,
    "Gemma4AudioFeatureExtractor": Gemma4AudioProcessor.open,
    "Gemma4UnifiedAudioFeatureExtractor": Gemma4UnifiedAudioProcessor.open,
    "WhisperFeatureExtractor": QwenAudioProcessor.open,
}
# Processors by `model_type`, for models whose `config.json` has no part for an encoder.
SOUNDS_BY_MODEL: dict[str, Open] = {"whisper": WhisperAudioProcessor.open}
VIDEOS: dict[str, Open] = {
    "InternVLVideoProcessor": InternVLVideoProcessor.open,
    "LlavaOnevisionVideoProcessor": LlavaOnevisionVideoProcessor.open,
    "Gemma4VideoProcessor": Gemma4VideoProcessor.open,
    "Gemma4UnifiedVideoProcessor": Gemma4VideoProcessor.open,
    "Ernie4_5_VLMoeVideoProcessor": ErnieVideoProcessor.open,
    "Ernie4_5_VL_MoeVideoProcessor": ErnieVideoProcessor.open,
    "Glm4vVideoProcessor": GlmVideoProcessor.open,
    "Glm46VVideoProcessor": Glm46VideoProcessor.open,
    "MiniCPMV4_6VideoProcessor": MiniCpmVideoProcessor.open,
    "minicpmv4_6": MiniCpmVideoProcessor.open,
    "Qwen2VLVideoProcessor": open_video,
    "Qwen3VLVideoProcessor": Qwen3VideoProcessor.open,
}
# Models of these image processors were published without settings for videos.
VIDEOS_BESIDE_PICTURES: dict[str, Open] = {
    "LlavaOnevisionImageProcessor": LlavaOnevisionVideoProcessor.open,
    "LlavaOnevisionImageProcessorFast": LlavaOnevisionVideoProcessor.open,
    "Qwen2VLImageProcessor": open_video_beside_pictures,
    "Qwen2_5_VLImageProcessor": QwenVideoProcessor.open_beside_pictures,
}
