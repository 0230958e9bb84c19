"""Drafters: they guess tokens that a step of the engine then verifies. Pure Python."""
