"""Runs the programs of steps as CUDA graphs."""
