"""Choice of a model's dialect, and properties that all dialects share."""

from __future__ import annotations

from itertools import pairwise

import pytest

from quire.core.errors import ModelError
from quire.text.dialects import DIALECTS, choose_dialect
from quire.text.dialects.marker_parser import MarkerParser
from tests.text.dialects.scripts import encode, vocabulary


@pytest.mark.parametrize(
    ("template", "model_type", "name"),
    [
        ("{{ bos }}<|turn>{% tools %}<|tool_call>call:", "gemma4", "gemma4"),
        ("", "gemma4_text", "gemma4"),
        ("<|im_start|>...<tool_call>\n{...}", "qwen3", "qwen3"),
        ("<|im_start|>...<tool_call>\n<function=example><parameter=a>", "qwen3_5", "qwen3_coder"),
        ("<seed:tool_call>\n<function=example><parameter=a>", "seed_oss", "seed"),
        ("", "glm_moe_dsa", "glm4"),
        ("<|im_start|>", "qwen2", "qwen3"),
        ("<|start_header_id|>...<|python_tag|>", "llama", "llama3"),
        ("<|header_start|>", "llama4", "llama3"),
        ("[INST] ... [TOOL_CALLS]", "mistral", "mistral"),
        ("<｜User｜>...<｜Assistant｜><｜tool▁calls▁begin｜>", "qwen2", "deepseek"),
        ("", "deepseek_v3", "deepseek"),
        ("<｜Assistant｜>...<｜DSML｜function_calls>", "deepseek_v32", "dsml"),
        ("<｜Assistant｜>...<｜tool▁calls▁begin｜>", "deepseek_v32", "deepseek"),
        ("", "deepseek_v4", "dsml"),
        ("<tool_call>{{ name }}<arg_key>", "glm4_moe", "glm4"),
        ("<|start|>assistant<|channel|>", "gpt_oss", "harmony"),
        ("<|start_of_role|>...<tool_call>", "granitemoehybrid", "granite"),
        ("<|tool_calls_section_begin|>", "deepseek_v3", "kimi_k2"),
        ("<|open|>message role=", "kimi_k3", "kimi_k3"),
        ("", "kimi_k3", "kimi_k3"),
        ("<|start|>...<atem:function_calls>", "muse_glimmer", "muse"),
        ("", "muse_glimmer", "muse"),
        ("<minimax:tool_call>", "minimax_m2", "minimax"),
        ("<|im_start|>...<|tool_list_start|>", "lfm2", "lfm2"),
        ("<|CHATBOT_TOKEN|>...Write 'Action:'", "cohere", "cohere"),
        ("<|bom|><|assistant|>...<tool_calls>", "jamba", "jamba"),
        ("<|im_start|>...<think>...<tool_call>", "jamba", "qwen3"),
        ("<tool_call>{{ name }}<tool_sep>...<arg_key>", "hy_v3", "hy3"),
        ("", "hy_v3", "hy3"),
        ("USER:<longcat_tool_call>", "longcat_flash", "longcat"),
        ("", "longcat_flash", "longcat"),
        ("<|tools_prefix|>", "apertus", "apertus"),
        ("<tool_call>{{ name }}<arg_key>", "laguna", "glm4"),
        ("<|extra_0|>...<tool_calls>", "hunyuan_v1_moe", "hunyuan"),
        ("<SPECIAL_11>Assistant...<TOOLCALL>[", "nemotron_h", "nemotron"),
        ("<|start_header_id|>...<TOOLCALL>[", "llama", "nemotron"),
        ("<extra_id_1>Assistant", "nemotron", "nemotron_mini"),
        ("<|im_start|>...<functions>...<function_calls>", "olmo3", "olmo3"),
        ("<|tool|>...<|/tool|>...<|assistant|>", "phi3", "phi4"),
        ("<|user|>...<|assistant|>", "phi3", "none"),
        ("<think>...<tool_call>...<response>", "ernie4_5_moe", "ernie"),
        ("[gMASK]<sop><|assistant|>...<|observation|>", "glm4", "glm4_9b"),
        ("{{ messages }}", "llama", "none"),
        ("", "gpt2", "none"),
    ],
)
def test_choice_from_template_and_type(template: str, model_type: str, name: str) -> None:
    assert choose_dialect(template, model_type).name == name


def test_override() -> None:
    assert choose_dialect("<|tool_call>", "gemma4", "none").name == "none"
    assert choose_dialect("", "gpt2", "qwen3_coder").name == "qwen3_coder"
    with pytest.raises(ModelError, match=r"'hermes'.*qwen3"):
        choose_dialect("", "gpt2", "hermes")


@pytest.mark.parametrize("name", DIALECTS)
def test_no_marker_starts_another(name: str) -> None:
    parser = DIALECTS[name].parser([], [], vocabulary(name))
    assert isinstance(parser, MarkerParser)
    markers = sorted(parser.layout.markers())
    assert not any(b.startswith(a) for a, b in pairwise(markers))


def test_thinking_ids() -> None:
    def ids(name: str) -> list[list[int]] | None:
        found = DIALECTS[name].thinking(vocabulary(name))
        return None if found is None else [list(part) for part in found]

    assert ids("qwen3") == [encode("qwen3", ["<think>"]), encode("qwen3", ["</think>"])]
    assert ids("gemma4") == [encode("gemma4", ["<|channel>"]), encode("gemma4", ["<channel|>"])]
    assert ids("harmony") == [
        encode("harmony", ["<|channel|>analysis<|message|>"]),
        encode("harmony", ["<|end|><|start|>assistant<|channel|>final<|message|>"]),
    ]
    assert ids("llama3") is None
    assert ids("none") is None
