"""What the HTTP side and the engine's process share. Imports nothing of either."""
