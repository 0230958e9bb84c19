"""Layers that families are composed of: attention, norms, rotations, experts, recurrences."""
