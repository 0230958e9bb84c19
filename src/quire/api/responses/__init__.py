"""`/v1/responses` (OpenAI)."""
