"""Request fields of other servers: which are aliases, which have no effect, and which are refused.

Clients send one body to many servers. So a field that an endpoint's schema lacks is

* read as another field, if it is an alias of that (`ALIASES`);
* ignored, if its value asks for what this server does anyway (`DEFAULTS`);
* refused, if another server honours it and it binds the answer or changes the prompt (`_BINDING`);
* ignored and named to the client, if another server honours it;
* refused with the nearest known name otherwise.

`peers` lists the fields of servers that run on the client's machine. The names listed here are of
SGLang, LM Studio, mlx-lm, Text Generation Inference, text-generation-webui, and of hosts and
gateways: OpenRouter, LiteLLM, Together, Fireworks, DeepSeek, Mistral, Groq, xAI, Alibaba's Model
Studio.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

from quire.api.shared.peers import PEERS

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
    "n": ("n_cmpl",),
    "repetition_penalty": ("repeat_penalty", "rep_pen"),
    "seed": ("random_seed", "sampling_seed"),
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop",),
    "typical_p": ("typical",),
    "thinking_budget": (
        "thinking_token_budget",
        "thinking_budget_tokens",
        "reasoning_budget",
        "reasoning_budget_tokens",
    ),
}
"""Aliases of fields. An alias counts if the schema has the field but not the alias."""

DEFAULTS: dict[str, object] = {
    "_debug_render_only": False,
    "add_generation_prompt": True,
    "backend_sampling": False,
    "best_of": 1,
    "cache_prompt": True,
    "detokenize": True,
    "do_sample": True,
    "dynatemp_range": 0,
    "echo": False,
    "enable_response_messages": False,
    "frequency_penalty_range": 0,
    "include_reasoning": True,
    "include_stop_str_in_output": False,
    "length_penalty": 1,
    "min_new_tokens": 0,
    "min_tokens": 0,
    "mirostat": 0,
    "mllm_draft": False,
    "no_repeat_ngram_size": 0,
    "no_stop_trim": False,
    "num_beams": 1,
    "p_less": False,
    "parse_tool_calls": True,
    "post_sampling_probs": False,
    "raw": False,
    "return_full_text": False,
    "return_mm_kwargs": True,
    "return_prompt_text": False,
    "return_token_ids": False,
    "return_token_offsets": False,
    "return_tokens": False,
    "return_tokens_as_token_ids": False,
    "routed_experts_prompt_start": 0,
    "safe_prompt": False,
    "separate_reasoning": True,
    "skip_special_tokens": True,
    "shift": True,
    "spaces_between_special_tokens": True,
    "specprefill": False,
    "stream_reasoning": True,
    "tfs_z": 1,
    "timings_per_token": False,
    "tool_argument_recovery": "none",
    "typical_p": 1,
    "use_beam_search": False,
    "verbose": False,
    "watermarking": False,
    "xtc_probability": 0,
}
"""Values of fields that ask for what this server does anyway, so that the client need not be told.

They count for endpoints whose schema lacks the field. Fields of `DecodingFields` are among them for
the other endpoints; a new one joins only if clients send it there.
"""

_OTHERS = """
adapter_id adapters add_bos_token additional_drop_params allowed_openai_params api_base api_key
api_version ban_eos_token banned_strings banned_tokens base_url bootstrap_host bootstrap_port
bootstrap_room cache caching cfg_scale citation_options compliance compound_custom context_length
context_length_exceeded_behavior continue_assistant_turn custom_llm_provider custom_logit_processor
custom_params custom_token_bans data_parallel_rank debug decoder_input_details deferred details
disable_tool_validation draft_model drop_params dynamic_temperature dynatemp_high dynatemp_low
early_stopping ebnf enable_code_interpreter enable_search encoder_repetition_penalty epsilon_cutoff
eta_cutoff exclude_domains extra_body extra_headers extra_key fallbacks guardrails guidance_scale
image_config include_domains incremental_output input_ids input_kwargs litellm_call_id
litellm_metadata litellm_session_id litellm_trace_id lora_path mirostat_lr mirostat_target
mock_response models negative_prompt no_log num_draft_tokens num_retries penalize_nl penalty_alpha
perf_metrics_in_response plugins preset prompt_cache_isolation_key prompt_mode prompt_truncate_len
provider raw_output reasoning.exclude reasoning.summary reasoning_history reasoning_split regex
repetition_penalty_range request_timeout result_format return_cached_tokens_details
return_hidden_states rid role_mapping route safety_model sampler_priority search_options
search_parameters search_settings session_params skew smoothing_curve smoothing_factor
speculative_ngram stop_regex stream_options.chunk_include_usage
stream_options.continuous_usage_stats tags temperature_last think_mode thinking token_healing
tool_prompt tool_stream top_a top_n_tokens trace transforms translation_options truncation_length
ttl usage verbosity vl_high_resolution_images watermark
"""
_KNOWN = frozenset(_OTHERS.split()).union(*PEERS.values())
"""Paths of fields that other servers support; if the schema lacks them, they have no effect."""

_BINDING = frozenset(
    {"banned_strings", "banned_tokens", "custom_logit_processor", "custom_token_bans"}
    | {"grammar_lazy", "grammar_triggers", "logits_processors", "previous_input_messages"}
    | {"previous_response", "prompt_embeds", "stop_regex", "structural_tag"}
    | {"structured_outputs.structural_tag"}
)
"""Fields of other servers that are refused, because ignoring them would change the prompt or
answer.
"""

_LONGEST = 64  # characters of a name that are looked at, shown and told
_SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-[]$@")


def asks_for_default(path: str, value: object) -> bool:
    """Return whether a field asks for this server's default behaviour. Null does."""
    return value is None or (path in DEFAULTS and value == DEFAULTS[path])


def is_known(path: str) -> bool:
    """Return whether another server honours the field at `path`."""
    return path in _KNOWN or path in DEFAULTS


def is_one_of(path: str, fields: Collection[str]) -> bool:
    """Return whether `path` is one of some fields of ours, or an alias of one."""
    return path in fields or any(path in ALIASES.get(each, ()) for each in fields)


def binds(path: str, value: object) -> bool:
    """Return whether an answer must honour the field at `path`. Empty values need nothing."""
    return path in _BINDING and bool(value)


def nearest(path: str, fields: Collection[str], *, generates: bool) -> str | None:
    """Return the name that a client may have meant.

    Args:
        fields: the schema's.
        generates: whether the endpoint generates; what others know is of such endpoints, and is
            suggested for no other.
    """
    name = path[:_LONGEST]
    others = [other for field in fields for other in ALIASES.get(field, ())]
    for candidates in (fields, (*others, *_KNOWN, *DEFAULTS) if generates else ()):
        found = get_close_matches(name, candidates, n=1, cutoff=0.75)
        if found:
            return found[0]
    return None


def shown(path: str) -> str:
    """Return a name in a form that a header can carry, because a client may have invented it."""
    return "".join(each if each in _SAFE else "?" for each in path[:_LONGEST])


def renamed(payload: dict[str, object], fields: Collection[str]) -> dict[str, str]:
    """Return the schema's name for each field that `payload` gives by another name."""
    foreign = {name for name, value in payload.items() if name not in fields and value is not None}
    if not foreign:  # as in most requests
        return {}
    return {
        field: other
        for field, others in ALIASES.items()
        if field in fields
        for other in others
        if other in foreign
    }
