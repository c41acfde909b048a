"""The HTTP server: OpenAI's and Fireworks' dialects in front of an engine."""

from __future__ import annotations

# The distribution's version too: pyproject.toml reads it from here.
__version__ = "0.1.0"
