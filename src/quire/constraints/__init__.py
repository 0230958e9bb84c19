"""Constraints on the next token: grammars, thinking budgets, masks. Imports no MLX."""
