"""What may come next in an answer: grammars, thinking budgets, masks. Free of MLX."""
