"""How models write calls of tools, one record a family, and which family a model is of."""

from __future__ import annotations

import re
from typing import NamedTuple

from engine.text.template import ChatTemplate


class CallFormat(NamedTuple):
    """Where calls stand in a reply and how one is written.

    A reply's calls are `opening`, the first call, `closing`; further ones follow after `between`, each in
    its own pair where `repeats`, else inside the same one. A call is a JSON object of "name" and
    `arguments_key`; where `after_name` is not None it is the bare name, that text, and the JSON object of
    the arguments. `opening` and `after_name` may be control tokens of the model, which plain text never
    gives.
    """

    name: str
    opening: str
    closing: str
    between: str
    repeats: bool
    arguments_key: str = "arguments"
    after_name: str | None = None


HERMES = CallFormat("hermes", "<tool_call>\n", "\n</tool_call>", "\n", repeats=True)
LLAMA3 = CallFormat("llama3", "", "", "; ", repeats=False, arguments_key="parameters")
MISTRAL = CallFormat("mistral", "[TOOL_CALLS] [", "]", ", ", repeats=False)
MISTRAL_NAMED = CallFormat("mistral-named", "[TOOL_CALLS]", "", "", repeats=True, after_name="[ARGS]")

# How a template shows the probe's call, in the order of trying.
_SHAPES = (
    (HERMES, re.compile(r'<tool_call>\s*\{[^<]*"name":\s*"probe_tool"')),
    (MISTRAL, re.compile(r'\[TOOL_CALLS\]\s*\[?\s*\{[^\[]*"name":\s*"probe_tool"')),
    (MISTRAL_NAMED, re.compile(r"\[TOOL_CALLS\]\s*probe_tool")),
    (LLAMA3, re.compile(r'"name":\s*"probe_tool",\s*"parameters"')),
)
# Where a template can't show a call: words of its source, then of the vocabulary, that give a family away.
_WORDS = (
    (HERMES, ("<tool_call>",)),
    (MISTRAL_NAMED, ("[TOOL_CALLS]", "[ARGS]")),
    (MISTRAL, ("[TOOL_CALLS]",)),
    (LLAMA3, ("<|python_tag|>",)),
)


def detect(template: ChatTemplate | None, control_tokens: frozenset[str]) -> CallFormat:
    """The format that a model's template shows calls in, or HERMES where it knows no tools.

    HERMES also stands for templates with tools of a family that is not known here.
    """
    if template is None or not template.takes_tools:
        return HERMES
    shown = template.show_call("abcdefghi") or template.show_call("abcdefghi", None) or ""
    for family, shape in _SHAPES:
        if shape.search(shown):
            return family
    for text in (template.source, " ".join(sorted(control_tokens))):
        for family, words in _WORDS:
            if all(word in text for word in words):
                return family
    return HERMES
