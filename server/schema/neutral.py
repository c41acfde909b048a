"""Fields that clients send although they ask for nothing: taken when neutral, refused in words if not."""

from __future__ import annotations

from typing import Any

from engine import RequestError

# Fields that later versions will honour, each with the values that change nothing today. Both endpoints take
# all of them: clients send the neutral forms of a chat to completions too.
FIELDS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "echo": (False,),
    "echo_last": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "typical_p": (1, 1.0),
    "mirostat_target": (0, 0.0),
    "mirostat_lr": (),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "min_tokens": (0,),
    "reasoning_effort": ("none", False),
    "reasoning_history": (),
    "thinking": ({"type": "disabled"},),
    "prediction": (),
    "speculation": (),
    "raw_output": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "include_routing_matrix": (False,),
    "sampling_mask": (),
    "prompt_token_ids": (),
    "best_of": (1,),
    "suffix": ("",),
    "images": ([],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "prompt_truncate_len": (),
    "safe_tokenization": (True,),
    "modalities": (["text"],),
    "audio": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
# A message of a chat, as the openai client sends one of the server's own replies back.
MESSAGE: dict[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
}

# What is said where "not supported" would tell too little.
_WORDS = {"n": "Only n = 1 is supported yet", "best_of": "Only best_of = 1 is supported yet"}

# Accepted whatever they hold, and ignored: they steer what this server does not have.
TOLERATED = frozenset(
    {
        "chat_template_kwargs",
        "prompt_cache_retention",
        "prompt_cache_options",
        "store",
        "safety_identifier",
    }
)


def take_neutral(
    fields: dict[str, Any], neutral: dict[str, tuple[Any, ...]], *, at: str = ""
) -> dict[str, Any]:
    """Return `fields` without the neutral and the tolerated ones.

    Raises RequestError for a field that asks for something this server doesn't do yet.
    """
    left = {}
    for name, value in fields.items():
        if name in neutral:
            if value is not None and not any(_same(value, allowed) for allowed in neutral[name]):
                words = _WORDS.get(name, f"'{at}{name}' is not supported yet by this server")
                raise RequestError(words, param=at + name)
        elif at or name not in TOLERATED:
            left[name] = value
    return left


def _same(value: Any, allowed: Any) -> bool:
    # 0 == False and 1 == True in Python, but not in JSON.
    return type(value) is type(allowed) and bool(value == allowed)
