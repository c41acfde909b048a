"""Models: where their files are, what their configs mean, and the one decoder that runs them all."""
