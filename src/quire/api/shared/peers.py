"""Request fields that other servers take, server by server, as their own schemas list them.

`foreign` passes a field of this list that a schema of ours lacks, and tells the client its name.
"""

from __future__ import annotations

_VLLM = """
add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
chat_template_kwargs continue_final_message documents ec_transfer_params echo
enable_response_messages frequency_penalty ignore_eos include_reasoning include_stop_str_in_output
kv_transfer_params length_penalty logit_bias logits_processors logprob_token_ids logprobs
max_completion_tokens max_tokens media_io_kwargs min_p min_tokens mm_processor_kwargs n
parallel_tool_calls presence_penalty previous_input_messages previous_response priority
prompt_cache_key prompt_embeds prompt_logprobs reasoning_effort repetition_detection
repetition_penalty request_id response_format return_mm_kwargs return_prompt_text
return_routed_experts return_token_ids return_token_offsets return_tokens_as_token_ids
routed_experts_prompt_start seed session_id skip_special_tokens spaces_between_special_tokens stop
stop_token_ids stream_interval structured_outputs thinking_token_budget top_k top_logprobs
truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking
guided_json guided_regex guided_choice guided_grammar guided_decoding_backend
guided_whitespace_pattern structural_tag
structured_outputs.disable_additional_properties structured_outputs.disable_any_whitespace
structured_outputs.disable_fallback structured_outputs.structural_tag
structured_outputs.whitespace_pattern
"""

_LLAMA_CPP = """
adaptive_decay adaptive_target backend_sampling cache_prompt chat_format chat_parser
continue_final_message dry_allowed_length dry_base dry_multiplier dry_penalty_last_n
dry_sequence_breakers dynatemp_exponent dynatemp_range echo frequency_penalty generation_prompt
grammar grammar_lazy grammar_triggers grammar_type id_slot ignore_eos json_schema logit_bias lora
max_completion_tokens max_tokens min_keep min_p mirostat mirostat_eta mirostat_tau n n_cache_reuse
n_cmpl n_discard n_indent n_keep n_predict n_probs parse_tool_calls post_sampling_probs
presence_penalty preserved_tokens reasoning_budget_end_tag reasoning_budget_end_tags
reasoning_budget_message reasoning_budget_start_tag reasoning_budget_tokens reasoning_control
reasoning_format repeat_last_n repeat_penalty response_fields return_progress return_tokens samplers
seed speculative.n_max speculative.n_min speculative.ngram_min_hits speculative.ngram_size_m
speculative.ngram_size_n speculative.p_min speculative.type sse_ping_interval stop t_max_predict_ms
t_max_prompt_ms temperature thinking_budget_tokens thinking_forced_open timings_per_token top_k
top_n_sigma top_p typical_p verbose xtc_probability xtc_threshold
"""

_MLX_VLM = """
adapter_path block_length context_management diffusion_full_canvas diffusion_max_canvas_length
diffusion_min_canvas_length diffusion_sampler editing_threshold enable_thinking
frequency_context_size frequency_penalty keep_tokens logit_bias logprobs max_denoising_steps
max_pixels max_post_steps max_transfer_per_step min_p min_pixels min_threshold num_to_transfer
p_less presence_context_size presence_penalty reasoning reasoning_effort repetition_context_size
repetition_penalty resize_shape response_format seed stability_steps thinking_budget
thinking_end_token thinking_start_token threshold tool_parser top_k top_logprobs top_n_sigma
typical_p
"""

_VLLM_MLX = """
chat_template_kwargs enable_thinking logit_bias min_p mllm_draft presence_penalty reasoning_effort
repetition_penalty response_format specprefill specprefill_backbone_pct specprefill_keep_pct
thinking_token_budget timeout tool_argument_recovery top_k video_fps video_max_frames
"""

_OMLX = """
chat_template_kwargs frequency_penalty min_p presence_penalty seed specprefill specprefill_keep_pct
specprefill_threshold structured_outputs thinking_budget xtc_probability xtc_threshold
"""

_OLLAMA = """
_debug_render_only draft_num_predict f16_kv format frequency_penalty keep_alive logits_all
logprobs low_vram main_gpu mirostat mirostat_eta mirostat_tau num_batch
num_ctx num_gpu num_keep num_predict num_thread numa options penalize_newline presence_penalty raw
reasoning reasoning_effort repeat_last_n repeat_penalty seed shift stop template tfs_z think
top_k top_logprobs truncate typical_p use_mlock use_mmap vocab_only
"""

_ANTHROPIC = """
output_config.task_budget
"""
"""Fields of Anthropic's beta features."""

PEERS = {
    "vLLM": frozenset(_VLLM.split()),
    "llama.cpp": frozenset(_LLAMA_CPP.split()),
    "mlx-vlm": frozenset(_MLX_VLM.split()),
    "vllm-mlx": frozenset(_VLLM_MLX.split()),
    "oMLX": frozenset(_OMLX.split()),
    "Ollama": frozenset(_OLLAMA.split()),
    "Anthropic": frozenset(_ANTHROPIC.split()),
}
"""Paths of fields by the server that takes them. Fields of our own protocols are not listed."""
