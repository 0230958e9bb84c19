"""Families whose tool calls and reasoning have no dialect here."""

from __future__ import annotations

from tests.text.published.fact import CHATML, CHATML_ANSWER, Published

GLM4_ENDS = {"<|endoftext|>": 151329, "<|user|>": 151336, "<|observation|>": 151338}
PHI3_ENDS = {"<|endoftext|>": 32000, "<|assistant|>": 32001, "<|end|>": 32007}
GEMMA = "<start_of_turn>user\n{}<end_of_turn>\n"
GEMMA_ANSWER = "<start_of_turn>model\n"
COHERE = "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{}<|END_OF_TURN_TOKEN|>"
COHERE_ANSWER = "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"

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
        ("gemma3", "gemma3_text"),
        "google/gemma-3-4b-it",
        "none",
        GEMMA,
        GEMMA_ANSWER,
        "",
        {"<eos>": 1, "<end_of_turn>": 106},
        {"<start_of_turn>": 105},
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
    Published(
        ("glm", "glm4", "glm4v"),
        "zai-org/GLM-4-9B-0414",
        "none",
        "<|user|>\n{}",
        "<|assistant|>\n",
        "",
        GLM4_ENDS,
        {"<|assistant|>": 151337},
    ),
    Published(("glm_ocr",), "zai-org/GLM-OCR", "none", "<|user|>\n{}", "<|assistant|>\n"),
    Published(
        ("cohere", "cohere2"),
        "CohereForAI/c4ai-command-r-v01",
        "none",
        COHERE,
        COHERE_ANSWER,
        "",
        {"<|END_OF_TURN_TOKEN|>": 255001},
        {"<|START_OF_TURN_TOKEN|>": 255000},
    ),
    Published(("arcee",), "arcee-ai/AFM-4.5B", "none", CHATML, CHATML_ANSWER),
    Published(
        ("ernie4_5", "ernie4_5_moe"),
        "baidu/ERNIE-4.5-21B-A3B-PT",
        "none",
        "User: {}\n",
        "Assistant: ",
        "",
        {"</s>": 2},
    ),
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
        ("nemotron",),
        "nvidia/Nemotron-Mini-4B-Instruct",
        "none",
        "<extra_id_1>User\n{}\n",
        "<extra_id_1>Assistant\n",
        "",
        {"</s>": 3},
    ),
    Published(("jamba",), "ai21labs/Jamba-v0.1", "none", ends={"<|endoftext|>": 2}),
    Published(
        ("lfm2", "lfm2_moe"),
        "LiquidAI/LFM2-1.2B",
        "none",
        CHATML,
        CHATML_ANSWER,
        "<|tool_list_start|><|tool_list_end|>",
        {"<|im_end|>": 7},
        {"<|im_start|>": 6},
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
)
