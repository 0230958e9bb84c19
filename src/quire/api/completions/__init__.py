"""`/v1/completions` (OpenAI)."""
