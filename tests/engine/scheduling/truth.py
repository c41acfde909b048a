"""What requests give without cache, chunks or company: a model made of checksums, and grammars to match."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from engine.errors import ConstraintFailed
from engine.types import Constraint, EngineRequest, FinishReason, SamplingParams, TokenLogprob

STOP = 3


def choose(seed: int, tokens: Iterable[int], allow: Sequence[int] | None = None) -> int:
    """The token that follows: a fixed function of seed and tokens, a stop token about once in nine."""
    digest = zlib.crc32(repr((seed, list(tokens))).encode()) >> 3
    if allow is not None:
        return allow[digest % len(allow)]
    return STOP if digest % 9 == 0 else digest % 3


def score(tokens: Sequence[int], seen: int, target: int, top: int) -> TokenLogprob:
    """The log-probability of `target` after the first `seen` of `tokens`: each of them counts."""
    digest = zlib.crc32(repr((tokens[:seen], target)).encode())
    return TokenLogprob(target, -(digest % 10**6) / 1e3, tuple((digest + i, -float(i)) for i in range(top)))


def scores(request: EngineRequest) -> tuple[TokenLogprob | None, ...]:
    """The log-probabilities of the prompt that the request asks for: nothing predicts the first token."""
    if (top := request.prompt_logprobs) is None:
        return ()
    tokens = list(request.prompt)
    return tuple(
        score(tokens, position, tokens[position], top) if position else None
        for position in range(request.prompt_logprobs_from, len(tokens))
    )


def bound_after(params: SamplingParams, bound: float | None, position: int) -> float | None:
    """Mirostat's bound after the token at `position`: it depends on all before."""
    return (bound or params.mirostat_target) * 1.25 + position if params.mirostat_target else None


class Script:
    """A constraint: its choice of tokens depends on all that were generated, it ends after `length` of them,
    and it can't follow more than `mask_limit` (asked for a mask) or `complete_limit` (asked for its end).

    AssertionError where it is led back and then elsewhere.
    """

    def __init__(self, length: int, mask_limit: int = 1000, complete_limit: int = 1000) -> None:
        self.limits = (length, mask_limit, complete_limit)
        self.source = f"script of {length}"
        self.masks = 0
        self._seen: list[int] = []

    def fresh(self) -> Script:
        return Script(*self.limits)

    def mask(self, generated: Sequence[int]) -> bytes:
        self.masks += 1
        self._follow(generated, self.limits[1])
        if len(generated) >= self.limits[0]:
            return bytes([1 << STOP])
        digest = zlib.crc32(repr(list(generated)).encode())
        return bytes([1 << digest % 3 | 1 << digest // 3 % 3])

    def complete(self, generated: Sequence[int]) -> bool:
        self._follow(generated, self.limits[2])
        return len(generated) >= self.limits[0]

    def _follow(self, generated: Sequence[int], limit: int) -> None:
        both = min(len(generated), len(self._seen))
        assert list(generated[:both]) == self._seen[:both], "its sequence became another"
        self._seen = max(self._seen, list(generated), key=len)
        if len(generated) > limit:
            raise ConstraintFailed(f"more than {limit} tokens")


def allowed(constraint: Constraint | None, generated: Sequence[int]) -> list[int] | None:
    """The tokens that may follow; None where all may."""
    if constraint is None:
        return None
    bits = int.from_bytes(constraint.mask(generated), "little")
    return [token for token in range(bits.bit_length()) if bits >> token & 1]


def alone(request: EngineRequest, seed: int, context: int) -> tuple[list[int], FinishReason]:
    """The tokens that the request generates, and its end."""
    tokens, params = list(request.prompt), request.params
    constraint = request.constraint.fresh() if isinstance(request.constraint, Script) else None
    generated: list[int] = []
    try:
        while params.max_tokens > 0:
            token = choose(seed, tokens, allowed(constraint, generated))
            ends = token in params.stop_token_ids and not params.ignore_eos
            if not ends and constraint is not None:
                ends = constraint.complete([*generated, token])
            tokens.append(token)
            generated.append(token)
            if ends:
                return generated, "stop"
            if len(generated) >= params.max_tokens or len(tokens) >= context:
                break
    except ConstraintFailed:
        return generated, "error"
    return generated, "length"
