"""How models write calls of tools, one record a family."""

from __future__ import annotations

from typing import NamedTuple


class CallFormat(NamedTuple):
    """Where calls stand in a reply and how one is written.

    A reply's calls are `opening`, the first call, `closing`; further ones follow after `between`, each in
    its own pair where `repeats`, else inside the same one. A call is a JSON object of "name" and
    `arguments_key`. `opening` may be a control token of the model, which plain text never gives.
    """

    name: str
    opening: str
    closing: str
    between: str
    repeats: bool
    arguments_key: str = "arguments"


HERMES = CallFormat("hermes", "<tool_call>\n", "\n</tool_call>", "\n", repeats=True)
LLAMA3 = CallFormat("llama3", "", "", "; ", repeats=False, arguments_key="parameters")
MISTRAL = CallFormat("mistral", "[TOOL_CALLS] [", "]", ", ", repeats=False)
