"""Checks of a trained drafter: weights, reload, compiled path, generation and acceptance."""
