"""What an attacker sends, and what his neighbour notices of it."""
