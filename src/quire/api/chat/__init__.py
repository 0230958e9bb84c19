"""`/v1/chat/completions` (OpenAI)."""
