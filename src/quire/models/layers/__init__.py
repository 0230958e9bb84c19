"""Layers that families compose: attention, norms, rotations, experts, recurrences."""
