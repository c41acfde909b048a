"""Grammars that replies must follow: from a request's fields to what the engine is held to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.text import GrammarSpec
from server.schema.requests import ResponseFormat
from server.schema.tools import Choice, read_format

if TYPE_CHECKING:
    from engine import TextCodec
    from engine.text import CompiledGrammar


def compile_format(codec: TextCodec, given: ResponseFormat | None) -> CompiledGrammar | None:
    """Compile the form that replies must have; None for plain text. Slow: for a worker. RequestError."""
    found = read_format(given)
    if found is None:
        return None
    spec, field = found
    return codec.grammars.compile(spec, param=field)


def compile_calls(codec: TextCodec, tools: Choice) -> CompiledGrammar | None:
    """Compile what a reply must be that has to call; None where it need not. Slow: for a worker.

    Raises RequestError.
    """
    if not tools.required:
        return None
    spec = GrammarSpec.for_calls(tools.grammar_tools(), codec.call_format, parallel=tools.parallel)
    return codec.grammars.compile(spec, param="tools")
