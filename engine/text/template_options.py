"""What a request may set of its model's chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import RequestError
from engine.text.template import ChatTemplate

FIELD = "chat_template_kwargs"
_MOST_OPTIONS = 32
_MOST_ITEMS = 32
_LONGEST_TEXT = 1000
# Templates may repeat or count up to a number.
_LARGEST_NUMBER = 1_000_000
_SHOWN = 100

_SWITCHES = ("enable_thinking", "thinking")
_EFFORT = "reasoning_effort"
_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high", "adaptive": "medium"}


def check_template_options(template: ChatTemplate | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's options as variables for the template.

    Allowed are the names that the template itself reads and that are not the renderer's own, with scalars or
    short lists of scalars. To switch off thinking is granted, as nothing to do, where a model has none.
    Raises RequestError naming the option.
    """
    if len(options) > _MOST_OPTIONS:
        raise RequestError(f"'{FIELD}' may hold at most {_MOST_OPTIONS} options", param=FIELD)
    known = template.variables if template else frozenset()
    reserved = template.reserved if template else frozenset()
    found = {}
    for name, value in options.items():
        where = f"{FIELD}.{name[:_SHOWN]}"
        if name in reserved:
            raise RequestError(f"'{where}' belongs to the chat template and can't be set", param=where)
        if name in known:
            _check(value, where)
            found[name] = value
        elif name not in _SWITCHES or value is not False:
            names = ", ".join(sorted(known)) or "nothing"
            raise RequestError(
                f"'{where}' is no option of this model's chat template, which reads {names}", param=where
            )
    return found


def thinking_options(template: ChatTemplate | None, effort: str | bool | int) -> dict[str, Any] | None:
    """The template variables that ask for an effort of reasoning; None where the model can't be asked.

    "none", False and 0 switch thinking off; any other effort, or budget in tokens, switches it on. Templates
    that know degrees are told low, medium or high; a budget counts as medium.
    """
    known = template.variables if template else frozenset()
    off = effort in ("none", False)
    found: dict[str, Any] = {name: not off for name in _SWITCHES if name in known}
    if _EFFORT in known:
        assert template is not None
        if not off:
            found[_EFFORT] = _EFFORTS.get(effort, effort) if isinstance(effort, str) else "medium"
        elif any(f"{quote}none{quote}" in template.source for quote in "'\""):
            found[_EFFORT] = "none"
    return found or None


def _check(value: Any, where: str) -> None:
    items = value if isinstance(value, list) else [value]
    if len(items) > _MOST_ITEMS:
        raise RequestError(f"'{where}' may hold at most {_MOST_ITEMS} items", param=where)
    for item in items:
        if isinstance(item, str):
            if len(item) > _LONGEST_TEXT:
                raise RequestError(f"'{where}' may have at most {_LONGEST_TEXT} characters", param=where)
        elif isinstance(item, int | float):
            if not -_LARGEST_NUMBER <= item <= _LARGEST_NUMBER:
                raise RequestError(f"'{where}' must lie within ±{_LARGEST_NUMBER:,}", param=where)
        elif item is not None:
            raise RequestError(
                f"'{where}' must be a string, number, boolean or null, or a short list of them", param=where
            )
