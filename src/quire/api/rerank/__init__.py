"""`/v1/rerank` as Cohere and Jina have it, and `/v1/score` as vLLM has it."""
