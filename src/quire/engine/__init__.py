"""The process that owns MLX: worker, engine and its assembly, token constraints, drafters."""
