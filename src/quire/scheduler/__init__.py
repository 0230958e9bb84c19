"""Decides which tokens of which sequences a step computes, and in which blocks. No MLX here."""
