"""`/infill` (llama.cpp)."""
