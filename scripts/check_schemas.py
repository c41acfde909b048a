#!/usr/bin/env python3
"""Check that replies held to a JSON schema parse and validate, on the default model.

200 schemas whose texts are bounded: every reply that is not cut must parse and validate, and at least 160
must end within 512 tokens. 50 unbounded ones must do the same or be cut. Half of the replies are greedy, half
sampled at temperature 1 under a seed. Prints a table and a verdict; exits 1 where a bar is missed. Run it
from the project's environment:

    .venv/bin/python scripts/check_schemas.py [--tokens 512] [--batch 16] [--only PART-OF-NAME] [--show]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jsonschema
from check_schemas_cases import Case, cases

from engine import Engine, EngineConfig, EngineRequest, SamplingParams, TextCodec
from engine.errors import HeadwaterError
from engine.models import store
from engine.text import GrammarSpec

_ENOUGH = 0.8  # of the bounded ones must end


class Outcome(NamedTuple):
    """How one case ended: "valid", "cut" at the token limit, or "wrong", with the reply or why."""

    case: Case
    verdict: str
    tokens: int
    text: str
    why: str = ""


def judge(case: Case, text: str, finish: str | None, tokens: int, error: str | None = None) -> Outcome:
    """Hold a reply against its schema. A reply that was cut need not even parse."""
    if finish == "length":
        return Outcome(case, "cut", tokens, text)
    if finish != "stop":
        return Outcome(case, "wrong", tokens, text, f"ended with {finish}: {error}")
    try:
        jsonschema.Draft202012Validator(case.schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as failure:
        return Outcome(case, "wrong", tokens, text, str(failure).splitlines()[0])
    return Outcome(case, "valid", tokens, text)


def verdict(outcomes: Sequence[Outcome]) -> list[str]:
    """The bars that were missed, in words."""
    missed = [f"{o.case.name}: {o.why}" for o in outcomes if o.verdict == "wrong"]
    bounded = [o for o in outcomes if o.case.bounded]
    ended = sum(o.verdict != "cut" for o in bounded)
    if ended < _ENOUGH * len(bounded):
        missed.append(f"{ended} of {len(bounded)} bounded replies ended, fewer than {_ENOUGH:.0%}")
    return missed


def table(outcomes: Sequence[Outcome]) -> str:
    """One line a kind of schema: how its replies ended, and their tokens."""
    lines = ["shape            valid   cut  wrong  tokens (median, most)"]
    shapes = dict.fromkeys(_shape(o.case) for o in outcomes)
    for shape in shapes:
        group = [o for o in outcomes if _shape(o.case) == shape]
        counts = Counter(o.verdict for o in group)
        tokens = sorted(o.tokens for o in group)
        lines.append(
            f"{shape:<15}{counts['valid']:>7}{counts['cut']:>6}{counts['wrong']:>7}"
            f"  {tokens[len(tokens) // 2]:>6}, {tokens[-1]}"
        )
    return "\n".join(lines)


def _shape(case: Case) -> str:
    return case.name.rpartition("_")[2]


class Lab:
    """The engine and the codec, running cases one batch after the other."""

    def __init__(self, engine: Engine, codec: TextCodec, tokens: int) -> None:
        self._engine, self._codec, self._tokens = engine, codec, tokens

    async def run(self, number: int, case: Case) -> Outcome:
        """One reply: greedy where `number` is even, else sampled under it as seed."""
        try:
            request = await asyncio.to_thread(self._request, number, case)
        except HeadwaterError as error:
            return Outcome(case, "wrong", 0, "", f"refused: {error}")
        detokenizer = self._codec.detokenizer(request.prompt)
        parts: list[str] = []
        tokens, finish, error_text = 0, None, None
        async for delta in self._engine.submit(request):
            parts.append(detokenizer.push(delta.token_ids))
            tokens += len(delta.token_ids)
            finish, error_text = delta.finish_reason, delta.error
        return judge(case, "".join([*parts, detokenizer.flush()]), finish, tokens, error_text)

    def _request(self, number: int, case: Case) -> EngineRequest:
        spec = GrammarSpec("json_schema", json.dumps(case.schema))
        messages = [{"role": "user", "content": case.ask}]
        return EngineRequest(
            request_id=case.name,
            prompt=tuple(self._codec.encode_chat(messages)),
            params=SamplingParams(
                max_tokens=self._tokens,
                temperature=float(number % 2),
                seed=number,
                stop_token_ids=self._codec.eos_ids,
            ),
            constraint=self._codec.grammars.compile(spec).start(),
        )


async def run_all(chosen: Sequence[Case], tokens: int, batch: int) -> list[Outcome]:
    """Every case on the default model, `batch` at a time."""
    codec = TextCodec.load(store.fetch(store.DEFAULT_MODEL).path)
    engine = await Engine.start(EngineConfig())
    lab = Lab(engine, codec, tokens)
    outcomes: list[Outcome] = []
    try:
        for first in range(0, len(chosen), batch):
            group = enumerate(chosen[first : first + batch], first)
            outcomes += await asyncio.gather(*(lab.run(number, case) for number, case in group))
            print(f"{len(outcomes)} of {len(chosen)} replies", file=sys.stderr, flush=True)
    finally:
        await engine.close()
        codec.grammars.close()
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen cases and print how they ended; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--only", default="", help="run the cases with this in their name")
    parser.add_argument("--show", action="store_true", help="print every reply")
    options: Any = parser.parse_args(arguments)
    started = time.monotonic()
    chosen = [case for case in cases() if options.only in case.name]
    outcomes = asyncio.run(run_all(chosen, options.tokens, options.batch))
    if options.show:
        for outcome in outcomes:
            print(f"{outcome.case.name} ({outcome.verdict}, {outcome.tokens} tokens): {outcome.text}")
    print(table(outcomes))
    missed = verdict(outcomes)
    print("\n".join(missed))
    seconds = time.monotonic() - started
    print(f"{len(outcomes)} schemas in {seconds:.0f} s: {'FAILED' if missed else 'all bars met'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
