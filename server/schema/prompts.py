"""Prompts, stop strings and token ids of a request, checked."""

from __future__ import annotations

import re
from typing import Any

from engine import RequestError
from server.schema import strict
from server.schema.requests import MAX_STOPS

MAX_BIAS = 1024
MAX_STOP_IDS = 64
_INTEGER = re.compile(r"0|[1-9][0-9]{0,9}")


def read_prompts(prompt: Any, *, vocab_size: int, max_prompts: int) -> list[str | tuple[int, ...]]:
    """Bring the four forms of a prompt (text, texts, ids, lists of ids) to a list of prompts.

    Raises RequestError for another form, an empty list, or an id outside [0, vocab_size).
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise RequestError(
            "'prompt' must be a text, a list of texts, a list of token ids or a list of such lists",
            param="prompt",
        )
    if not prompt:
        raise RequestError("'prompt' is empty", param="prompt")
    if type(prompt[0]) is int:
        return [_prompt_ids(prompt, vocab_size)]
    if len(prompt) > max_prompts:
        raise RequestError(
            f"'prompt' holds {len(prompt)} prompts; at most {max_prompts} are taken", param="prompt"
        )
    if all(isinstance(item, str) for item in prompt):
        return list(prompt)
    return [_prompt_ids(item, vocab_size) for item in prompt]


def read_stops(stop: str | list[str] | None, *, max_chars: int) -> tuple[str, ...]:
    """Return the stop strings; null, absent and [] are the same. Raises RequestError."""
    stops = [stop] if isinstance(stop, str) else (stop or [])
    if len(stops) > MAX_STOPS:
        raise RequestError(f"'stop' may hold at most {MAX_STOPS} strings; given: {len(stops)}", param="stop")
    for text in stops:
        if not text:
            raise RequestError("'stop' may not hold an empty string: it would match everywhere", param="stop")
        if len(text) > max_chars:
            raise RequestError(
                f"'stop' strings may have at most {max_chars} characters; given: {len(text)}", param="stop"
            )
    return tuple(stops)


def read_stop_ids(ids: list[int] | None, *, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that end a reply beside the model's own. Raises RequestError."""
    ids = ids or []
    if len(ids) > MAX_STOP_IDS:
        raise RequestError(
            f"'stop_token_ids' may hold at most {MAX_STOP_IDS} ids; given: {len(ids)}", param="stop_token_ids"
        )
    return check_ids(ids, vocab_size, "stop_token_ids")


def read_bias(bias: dict[str, Any] | None, *, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Return token ids with what is added to their logits. Raises RequestError naming the key."""
    bias = bias or {}
    if len(bias) > MAX_BIAS:
        raise RequestError(
            f"'logit_bias' may hold at most {MAX_BIAS} tokens; given: {len(bias)}", param="logit_bias"
        )
    return tuple((_bias_id(key, vocab_size), _bias_value(key, value)) for key, value in bias.items())


def check_ids(ids: Any, vocab_size: int, field: str) -> tuple[int, ...]:
    """Return `ids`, all of them integers in [0, vocab_size). Raises RequestError naming one that isn't."""
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"'{field}' holds {strict.shown(token_id)}, which is not a token id: "
                f"an integer from 0 to {vocab_size - 1} was expected",
                param=field,
            )
    return tuple(ids)


def _prompt_ids(ids: Any, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(ids, list):
        raise RequestError(
            f"'prompt' mixes kinds: a list of token ids was expected; given: {strict.shown(ids)}",
            param="prompt",
        )
    if not ids:
        raise RequestError("'prompt' holds an empty list of token ids", param="prompt")
    return check_ids(ids, vocab_size, "prompt")


def _bias_id(key: str, vocab_size: int) -> int:
    if not _INTEGER.fullmatch(key) or int(key) >= vocab_size:
        raise RequestError(
            f"'logit_bias' has the key {strict.shown(key)}, which is not a token id: "
            f"an integer from 0 to {vocab_size - 1} was expected",
            param="logit_bias",
        )
    return int(key)


def _bias_value(key: str, value: Any) -> float:
    if type(value) not in (int, float) or not -100 <= value <= 100:
        raise RequestError(
            f"'logit_bias' of token {key} must be a number from -100 to 100; given: {strict.shown(value)}",
            param="logit_bias",
        )
    return float(value)
