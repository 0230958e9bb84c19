"""`/v1/messages` (Anthropic)."""
