"""`/v1/rerank` in the form of Cohere and Jina, and `/v1/score` in the form of vLLM."""
