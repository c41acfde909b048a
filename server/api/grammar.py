"""Grammars that replies must follow: from a request's fields to what the engine is held to."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from engine.text import GrammarSpec
from server.api.common import Services
from server.schema.requests import ResponseFormat
from server.schema.tools import Choice, read_format

if TYPE_CHECKING:
    from engine import TextCodec
    from engine.text import CompiledGrammar


class Wanted(NamedTuple):
    """What a reply must be, and the request's field that says so."""

    spec: GrammarSpec
    field: str


def wanted_format(given: ResponseFormat | None) -> Wanted | None:
    """The form that replies must have; None for plain text. Raises RequestError."""
    found = read_format(given)
    return None if found is None else Wanted(*found)


def wanted_calls(codec: TextCodec, tools: Choice) -> Wanted | None:
    """What a reply must be that has to call; None where it need not."""
    if not tools.required:
        return None
    spec = GrammarSpec.for_calls(tools.grammar_tools(), codec.call_format, parallel=tools.parallel)
    return Wanted(spec, "tools")


async def compile_grammar(services: Services, wanted: Wanted | None) -> CompiledGrammar | None:
    """Compile what is wanted, where it isn't yet, in a thread of its own: prompts must not wait for that.

    Raises RequestError for what can't be compiled, Overloaded where too many grammars wait.
    """
    if wanted is None:
        return None
    _, codec = services.backend.require()
    found = codec.grammars.find(wanted.spec, param=wanted.field)
    if found is None:
        found = await services.compilers.run(True, codec.grammars.compile, wanted.spec, param=wanted.field)
    return found
