"""Decides which tokens of which sequences a step computes, and in which pages. No MLX here."""
