"""Past one machine: engines as replicas of a Ray Serve deployment."""
