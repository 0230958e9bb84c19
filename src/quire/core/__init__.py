"""Types and tools that the HTTP side and the engine's process share. Imports neither."""
