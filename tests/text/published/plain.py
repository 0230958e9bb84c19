"""Families whose tool calls and reasoning have no dialect here."""

from __future__ import annotations

from tests.text.published.fact import CHATML, CHATML_ANSWER, Published

PHI3_ENDS = {"<|endoftext|>": 32000, "<|assistant|>": 32001, "<|end|>": 32007}
GEMMA = "<start_of_turn>user\n{}<end_of_turn>\n"
GEMMA_ANSWER = "<start_of_turn>model\n"

PLAIN: tuple[Published, ...] = (
    Published(("gemma",), "google/gemma-1.1-7b-it", "none", GEMMA, GEMMA_ANSWER, "", {"<eos>": 1}),
    Published(
        ("gemma2",),
        "google/gemma-2-9b-it",
        "none",
        GEMMA,
        GEMMA_ANSWER,
        "",
        {"<eos>": 1, "<end_of_turn>": 107},
        {"<start_of_turn>": 106},
    ),
    Published(
        ("gemma3", "gemma3_text", "gemma3n", "gemma3n_text"),
        "google/gemma-3-4b-it",
        "none",
        GEMMA,
        GEMMA_ANSWER,
        "",
        {"<eos>": 1, "<end_of_turn>": 106},
        {"<start_of_turn>": 105},
    ),
    Published(
        ("llava", "llava_next"),
        "llava-hf/llava-1.5-7b-hf",
        "none",
        "USER: {} ",
        "ASSISTANT:",
        "",
        {"</s>": 2},
    ),
    Published(
        ("deepseek_vl", "deepseek_vl_hybrid"),
        "deepseek-community/deepseek-vl-1.3b-chat",
        "none",
        "User: {}\n\n",
        "Assistant:",
        ends={"<｜end▁of▁sentence｜>": 100001},
    ),
    Published(
        ("internvl",),
        "OpenGVLab/InternVL3-8B-hf",
        "none",
        CHATML,
        CHATML_ANSWER,
        "",
        {"<|im_end|>": 151645},
        {"<img>": 151665, "</img>": 151666, "<IMG_CONTEXT>": 151667},
    ),
    Published(
        ("llava_onevision",),
        "llava-hf/llava-onevision-qwen2-7b-ov-hf",
        "none",
        "<|im_start|>user {}<|im_end|>",
        CHATML_ANSWER,
        "",
        {"<|im_end|>": 151645},
    ),
    Published(("phi",), "microsoft/phi-2", "none", ends={"<|endoftext|>": 50256}),
    Published(
        ("phi3", "phimoe"),
        "microsoft/Phi-3.5-mini-instruct",
        "none",
        "<|user|>\n{}<|end|>\n",
        "<|assistant|>\n",
        "",
        PHI3_ENDS,
        {"<|user|>": 32010},
    ),
    Published(
        ("olmo2",),
        "allenai/OLMo-2-1124-7B-Instruct",
        "none",
        "<|user|>\n{}\n",
        "<|assistant|>\n",
        "",
        {"<|endoftext|>": 100257},
    ),
    Published(
        ("olmoe",),
        "allenai/OLMoE-1B-7B-0924-Instruct",
        "none",
        "<|user|>\n{}\n",
        "<|assistant|>\n",
        "",
        {"<|endoftext|>": 50279},
    ),
    Published(("glm_ocr",), "zai-org/GLM-OCR", "none", "<|user|>\n{}", "<|assistant|>\n"),
    Published(("arcee",), "arcee-ai/AFM-4.5B", "none", CHATML, CHATML_ANSWER),
    Published(("helium",), "kyutai/helium-1-2b", "none"),
    Published(("starcoder2",), "bigcode/starcoder2-15b", "none", ends={"<|endoftext|>": 0}),
    Published(
        ("stablelm",),
        "stabilityai/stablelm-zephyr-3b",
        "none",
        "<|user|>\n{}<|endoftext|>\n",
        "<|assistant|>\n",
        "",
        {"<|endoftext|>": 0},
    ),
    Published(
        ("dots1",),
        "rednote-hilab/dots.llm1.inst",
        "none",
        "<|userprompt|>{}<|endofuserprompt|>",
        "<|response|>",
    ),
    Published(
        ("minicpm",), "openbmb/MiniCPM-2B-sft-bf16", "none", "<用户>{}", "<AI>", "", {"</s>": 2}
    ),
    Published(
        ("bailing_moe",),
        "inclusionAI/Ling-lite-1.5",
        "none",
        "<role>HUMAN</role>{}",
        "<role>ASSISTANT</role>",
        "",
        {"<|endoftext|>": 126081},
    ),
    Published(
        ("paddleocr_vl",),
        "PaddlePaddle/PaddleOCR-VL",
        "none",
        "User: {}\n",
        "Assistant: ",
        "",
        {"</s>": 2},
    ),
)
