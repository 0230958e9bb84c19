"""Text: tokenizer, chat template, detokenizer, stop strings, dialects. Never imports mlx."""
