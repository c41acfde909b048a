"""Sampling: from logits to tokens and log-probabilities, each row on its own."""
