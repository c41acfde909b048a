"""What the tests with unmodified client packages share."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from openai import pydantic_function_tool
from pydantic import BaseModel, ConfigDict, Field

R = TypeVar("R")

MODEL = "smollm2-135m-instruct"
FRANCE = "The capital of France is"
PAGE = 16


class GetWeather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=20)


class GetTime(BaseModel):
    """The time in a city."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=20)


def tools() -> list[Any]:
    """Both tools as OpenAI's client writes them."""
    return [pydantic_function_tool(GetWeather), pydantic_function_tool(GetTime)]


def user(text: str) -> dict[str, str]:
    """One user turn."""
    return {"role": "user", "content": text}


def numbers(length: int, seed: int) -> list[int]:
    """A prompt of ids of ordinary tokens; it shares nothing with another seed's."""
    rng = random.Random(f"clients {seed}")
    return [rng.randrange(1000, 40000) for _ in range(length)]


def apart() -> dict[str, str]:
    """Extra fields of a request that is to find an empty cache."""
    return {"prompt_cache_isolation_key": uuid.uuid4().hex}


def at_once(call: Callable[[Any], R], items: Iterable[Any]) -> list[R]:
    """Make one call an item, all at the same time, as the clients of a busy server do."""
    items = list(items)
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(call, items))
