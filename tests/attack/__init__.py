"""Attacks on a real server; each test asserts what a neighbour's stream notices of them."""
