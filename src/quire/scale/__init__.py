"""Engines beyond one machine, as replicas of a Ray Serve deployment."""
