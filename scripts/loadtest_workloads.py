"""The conversations of a load test: who says what, and what they share."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass

from loadtest_report import KINDS

WORDS = " ".join(
    [
        "time year people way day man thing woman life child world school state family student group",
        "country problem hand part place case week company system program question work government number",
        "night point home water room mother area money story fact month lot right study book eye job word",
        "business issue side kind head house service friend father power hour game line end member law car",
        "city community name president team minute idea body back parent face others level office door",
        "health person art war history party result change morning reason research girl guy moment air",
        "teacher force education",
    ]
).split()


@dataclass(frozen=True)
class Session:
    """A conversation to hold: `system` first if not empty, then the user's turns one by one."""

    kind: str
    system: str
    turns: tuple[str, ...]


def sessions(workload: str, options: argparse.Namespace, seed: int) -> Iterator[Session]:
    """Yield conversations for ever; the same arguments give the same ones."""
    rng = random.Random(f"{seed}/prompts")
    systems = [_text(rng, f"Guide {g} of run {seed}.", options.prefix_tokens) for g in range(options.groups)]
    number = 0
    while True:
        kind = rng.choice(KINDS) if workload == "mixed" else workload
        turns = options.turns if kind == "multi-turn" else 1
        texts = [_text(rng, f"Case {number}, part {t}.", options.prompt_tokens) for t in range(turns)]
        if kind == "no-sharing":
            texts[0] = f"{seed} {number} {texts[0]}"
        yield Session(kind, "" if kind == "no-sharing" else systems[number % len(systems)], tuple(texts))
        number += 1


def _text(rng: random.Random, opening: str, words: int) -> str:
    return " ".join([opening, *rng.choices(WORDS, k=max(words - len(opening.split()), 0))])
