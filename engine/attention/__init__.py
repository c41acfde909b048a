"""Attention executors: who owns the KV memory, and how rows of a step attend to it."""
