"""Request fields of other servers: under which name they are honoured here, or that they are not.

Clients send one body to many servers. A field that is another name of one of ours is read as that
one. A field that another server honours and this one cannot passes, and the client is told its
name. What nobody knows is refused, with the nearest name that somebody does.

Names are those of vLLM, SGLang, llama.cpp's server, Ollama, LM Studio, mlx-lm and mlx-vlm, Text
Generation Inference, text-generation-webui, and of hosts and gateways: OpenRouter, LiteLLM,
Together, Fireworks, DeepSeek, Mistral, Groq, xAI, Alibaba's Model Studio.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

ALIASES = {
    "guided_grammar": ("grammar", "ebnf"),
    "guided_json": ("json_schema",),
    "guided_regex": ("regex",),
    "max_output_tokens": ("max_tokens", "max_completion_tokens"),
    "max_tokens": (
        "max_completion_tokens",
        "max_new_tokens",
        "max_output_tokens",
        "n_predict",
        "num_predict",
    ),
    "min_tokens": ("min_new_tokens",),
    "repetition_penalty": ("repeat_penalty", "rep_pen"),
    "seed": ("random_seed", "sampling_seed"),
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop",),
    "thinking_budget": ("thinking_token_budget", "thinking_budget_tokens", "reasoning_budget"),
}
"""Other names of a field, where the schema at hand has it and not them."""

DEFAULTS: dict[str, object] = {
    "add_generation_prompt": True,
    "best_of": 1,
    "cache_prompt": True,
    "detokenize": True,
    "do_sample": True,
    "dynatemp_range": 0,
    "echo": False,
    "frequency_penalty_range": 0,
    "include_reasoning": True,
    "include_stop_str_in_output": False,
    "length_penalty": 1,
    "min_new_tokens": 0,
    "min_tokens": 0,
    "mirostat": 0,
    "no_repeat_ngram_size": 0,
    "no_stop_trim": False,
    "num_beams": 1,
    "parse_tool_calls": True,
    "raw": False,
    "return_full_text": False,
    "safe_prompt": False,
    "separate_reasoning": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stream_reasoning": True,
    "tfs_z": 1,
    "typical_p": 1,
    "use_beam_search": False,
    "xtc_probability": 0,
}
"""Fields with the value by which they ask for what happens here in any case; others do not hold."""

_OTHERS = """
chat_template_kwargs enable_thinking guided_json reasoning reasoning_effort think thinking
thinking_budget verbosity

adapter_id adapters adaptive_decay adaptive_target add_bos_token add_special_tokens
additional_drop_params allowed_openai_params allowed_token_ids api_base api_key api_version
backend_sampling bad_words ban_eos_token banned_strings banned_tokens base_url bootstrap_host
bootstrap_port bootstrap_room cache caching cfg_scale chat_template citation_options compliance
compound_custom context_length context_length_exceeded_behavior continue_assistant_turn
custom_llm_provider custom_logit_processor custom_params custom_token_bans data_parallel_rank
debug decoder_input_details deferred details disable_tool_validation documents draft_model
drop_params dry_allowed_length dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers
dynamic_temperature dynatemp_exponent dynatemp_high dynatemp_low early_stopping ebnf
enable_code_interpreter enable_search encoder_repetition_penalty epsilon_cutoff eta_cutoff
exclude_domains extra_body extra_headers extra_key fallbacks format frequency_context_size
grammar grammar_lazy grammar_triggers guardrails guidance_scale guided_choice
guided_decoding_backend guided_grammar guided_regex guided_whitespace_pattern id_slot
image_config include_domains incremental_output input_ids input_kwargs
kv_transfer_params litellm_call_id litellm_metadata litellm_session_id litellm_trace_id
logits_processors lora lora_path media_io_kwargs min_keep mirostat_eta mirostat_lr
mirostat_target mirostat_tau mm_processor_kwargs mock_response models n_cache_reuse n_discard
n_indent n_keep n_probs negative_prompt no_log num_ctx num_draft_tokens num_retries options
num_batch num_gpu num_keep num_thread
penalize_nl penalty_alpha perf_metrics_in_response plugins post_sampling_probs
presence_context_size preset priority prompt_cache_isolation_key prompt_logprobs prompt_mode
prompt_truncate_len provider raw_output reasoning_format reasoning_history reasoning_split regex
repeat_last_n repetition_context_size repetition_detection repetition_penalty_range request_id
request_timeout resize_shape response_fields result_format return_cached_tokens_details
return_hidden_states return_progress return_routed_experts return_token_ids return_tokens
return_tokens_as_token_ids rid role_mapping route safety_model sampler_priority samplers
search_options search_parameters search_settings session_id session_params skew smoothing_curve
smoothing_factor speculation speculative.n_max speculative.n_min speculative.p_min
speculative_ngram stop_regex structural_tag structured_outputs t_max_predict_ms tags
temperature_last template think_mode timeout timings_per_token token_healing tool_prompt
tool_stream top_a top_n_sigma top_n_tokens trace transforms translation_options truncate
truncate_prompt_tokens truncation_length ttl typical usage use_mlock use_mmap
vl_high_resolution_images vllm_xargs watermark xtc_threshold

structured_outputs.disable_additional_properties structured_outputs.disable_any_whitespace
structured_outputs.disable_fallback structured_outputs.structural_tag
structured_outputs.whitespace_pattern

reasoning.exclude reasoning.summary stream_options.continuous_usage_stats
stream_options.chunk_include_usage
"""
_IGNORED = frozenset(_OTHERS.split())
"""Paths of fields that other servers honour; where a schema lacks them, they have no effect."""

_LONGEST = 64  # characters of a name that are looked at, shown and told
_SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-[]$@")


def asks_for_default(path: str, value: object) -> bool:
    """Whether a field asks for what happens in any case; null asks for nothing."""
    return value is None or (path in DEFAULTS and value == DEFAULTS[path])


def is_known(path: str) -> bool:
    """Whether another server honours the field at `path`."""
    return path in _IGNORED or path in DEFAULTS


def nearest(path: str, fields: Collection[str], *, generates: bool) -> str | None:
    """The name that a client may have meant.

    Args:
        fields: the schema's.
        generates: whether the endpoint generates; what others know is of such endpoints, and is
            suggested for no other.
    """
    name = path[:_LONGEST]
    others = [other for field in fields for other in ALIASES.get(field, ())]
    for candidates in (fields, (*others, *_IGNORED, *DEFAULTS) if generates else ()):
        found = get_close_matches(name, candidates, n=1, cutoff=0.75)
        if found:
            return found[0]
    return None


def shown(path: str) -> str:
    """A name as a header can hold it: a client may have made it up."""
    return "".join(each if each in _SAFE else "?" for each in path[:_LONGEST])


def renamed(payload: dict[str, object], fields: Iterable[str]) -> dict[str, str]:
    """For each of a schema's fields that `payload` gives by another name, that name."""
    own = set(fields)
    return {
        field: other
        for field, others in ALIASES.items()
        if field in own
        for other in others
        if other not in own and payload.get(other) is not None
    }
