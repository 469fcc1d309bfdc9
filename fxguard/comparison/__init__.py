"""Compares two models on the same inputs, element by element."""
