"""vLLM's routes for LoRA adapters that come and go while the server runs."""
