"""The HTTP server of Headwater: OpenAI's and Fireworks' dialects over the engine's public face."""

from __future__ import annotations

__version__ = "0.1.0"
