"""Runs the programs of steps on a device."""
