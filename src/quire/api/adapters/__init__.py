"""vLLM's routes that load and unload LoRA adapters while the server runs."""
