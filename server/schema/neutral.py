"""Fields that clients send although they ask for nothing: taken when neutral, refused in words if not."""

from __future__ import annotations

from typing import Any

from engine import RequestError

# Fields that this server doesn't honour, each with the values that change nothing. Both endpoints take all of
# them: clients send the neutral forms of a chat to completions too.
_BOTH: dict[str, tuple[Any, ...]] = {
    "include_routing_matrix": (False,),
    "sampling_mask": (),
    "prompt_token_ids": (),
    "suffix": ("",),
    "images": ([],),
    "modalities": (["text"],),
    "audio": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
}
COMPLETION_FIELDS: dict[str, tuple[Any, ...]] = _BOTH | {
    "messages": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "prompt_truncate_len": (),
    "reasoning_history": (),
    "safe_tokenization": (),
}
CHAT_FIELDS: dict[str, tuple[Any, ...]] = _BOTH | {"best_of": (1,), "prompt": ()}
# A message of a chat, as the openai client sends one of the server's own replies back.
MESSAGE: dict[str, tuple[Any, ...]] = {"refusal": (), "audio": (), "annotations": ([],)}

# What is said where "not supported" would tell too little.
WORDS = {
    "suffix": "This model continues texts; it can't fill a gap in one, so 'suffix' is not supported",
    "images": "This model takes text only: 'images' is not supported",
    "audio": "This model gives text only: 'audio' is not supported",
    "modalities": "This model gives text only: 'modalities' may be [\"text\"]",
    "best_of": "'best_of' is a field of completions, not of chats",
    "messages": "'messages' belongs to /v1/chat/completions; give 'prompt' here",
    "prompt": "'prompt' belongs to /v1/completions; give 'messages' here",
    "tools": "'tools' belongs to /v1/chat/completions",
    "reasoning_history": "'reasoning_history' is for chats: a completions prompt is read as it is given",
    "safe_tokenization": "'safe_tokenization' is for chats: a completions prompt is read as it is given",
    "prompt_truncate_len": "'prompt_truncate_len' is for chats: it drops their oldest turns",
    "web_search_options": "This server searches nothing: 'web_search_options' is not supported",
}

# Accepted whatever they hold, and ignored: they steer what this server does not have.
TOLERATED = frozenset({"prompt_cache_retention", "prompt_cache_options", "store", "safety_identifier"})


def take_neutral(
    fields: dict[str, Any], neutral: dict[str, tuple[Any, ...]], *, at: str = ""
) -> dict[str, Any]:
    """Return `fields` without the neutral and the tolerated ones.

    Raises RequestError for a field that asks for something this server doesn't do.
    """
    left = {}
    for name, value in fields.items():
        if name in neutral:
            if value is not None and not any(_same(value, allowed) for allowed in neutral[name]):
                words = WORDS.get(name, f"'{at}{name}' is not supported by this server")
                raise RequestError(words, param=at + name)
        elif at or name not in TOLERATED:
            left[name] = value
    return left


def _same(value: Any, allowed: Any) -> bool:
    # 0 == False and 1 == True in Python, but not in JSON.
    return type(value) is type(allowed) and bool(value == allowed)
