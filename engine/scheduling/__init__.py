"""What runs in the next step, and over which pages. Synchronous, deterministic, no torch."""
