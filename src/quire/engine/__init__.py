"""The process that owns MLX: worker, engine, runner, encoder cache, token constraints."""
