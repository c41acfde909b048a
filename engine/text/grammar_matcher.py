"""A compiled grammar, and the constraint that follows one sequence through it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from llguidance import LLMatcher

from engine.errors import ConstraintFailed

# The lexer of a compiled grammar keeps each state it was ever in, for all sequences that follow it. It is
# made anew after so many tokens, and where a sequence meets its limit, unless that takes the compute thread
# longer than a step.
_WORN_TOKENS = 16_384
_RENEW_SECONDS = 0.05
_TOKEN_SECONDS = 0.1  # of CPU: all running sequences wait for a token's mask
_BYTES_PER_TOKEN = 8 << 10  # of lexer states that a token adds, at worst


class CompiledGrammar:
    """A grammar that any number of sequences can follow; they share what was compiled.

    `build` makes a matcher, `seconds` is what that takes.
    """

    def __init__(
        self, source: str, build: Callable[[], LLMatcher], eos_ids: tuple[int, ...], size: int, seconds: float
    ) -> None:
        self.source = source
        self.eos_ids = eos_ids
        self.tokens = 0
        self._build = build
        self._size = size
        self._seconds = seconds
        self._matcher = build()

    @property
    def weight(self) -> int:
        """About how many bytes this keeps, from above."""
        # A second of compiling was seen to leave up to 130 MB.
        return (
            (64 << 10) + 20 * self._size + int(self._seconds * (130 << 20)) + self.tokens * _BYTES_PER_TOKEN
        )

    @property
    def worn(self) -> bool:
        """Whether it should be compiled anew before more sequences follow it."""
        return self.tokens >= _WORN_TOKENS

    def start(self) -> GrammarConstraint:
        """A constraint for a new sequence, in microseconds."""
        return GrammarConstraint(self, self._matcher.deep_copy())

    def renewed(self) -> CompiledGrammar:
        """The same grammar compiled anew: no sequence's past is in it."""
        return CompiledGrammar(self.source, self._build, self.eos_ids, self._size, self._seconds)

    def alone(self) -> LLMatcher | None:
        """A matcher that shares nothing, or None where making one takes too long for the compute thread."""
        return self._build() if self._seconds <= _RENEW_SECONDS else None


class GrammarConstraint:
    """One sequence's way through a grammar: see engine.types.Constraint."""

    def __init__(self, grammar: CompiledGrammar, matcher: LLMatcher) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._shares = True
        self._seen: list[int] = []

    @property
    def source(self) -> str:
        """What it was compiled from: GrammarSpec.parse reads it."""
        return self._grammar.source

    def mask(self, generated: Sequence[int]) -> bytes:
        """Which tokens may follow, as little-endian bits. Raises ConstraintFailed."""
        self._follow(generated)
        started = time.thread_time()
        mask = self._matcher.compute_bitmask()
        self._check_time(started)
        self._grammar.tokens += 1
        if self._matcher.is_error():
            self._recover()
            mask = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                raise self._failed()
        return mask

    def complete(self, generated: Sequence[int]) -> bool:
        """Whether nothing but an end token can follow. Raises ConstraintFailed."""
        self._follow(generated)
        return bool(self._matcher.is_stopped())

    def _follow(self, generated: Sequence[int]) -> None:
        known = len(self._seen)
        # A reply only grows, so the last of the tokens known stands for all before it.
        if len(generated) < known or (known and generated[known - 1] != self._seen[-1]):
            raise ConstraintFailed(f"the tokens are not those that the grammar has followed ({known} tokens)")
        for token in generated[known:]:
            self._consume(token)
            self._seen.append(token)

    def _consume(self, token: int) -> None:
        if self._matcher.is_stopped() and not self._matcher.is_error() and token in self._grammar.eos_ids:
            return
        started = time.thread_time()
        taken = self._matcher.consume_token(token)
        self._check_time(started)
        if not taken:
            self._recover()
            if not self._matcher.consume_token(token):
                raise self._failed()

    def _recover(self) -> None:
        """Go on with a matcher of one's own where the shared one has met its limits; else raise."""
        failure = self._failed()
        matcher = self._grammar.alone() if self._shares and "lexer error" in str(failure) else None
        if matcher is None:
            raise failure
        self._grammar.tokens = max(self._grammar.tokens, _WORN_TOKENS)
        self._matcher, self._shares = matcher, False
        for token in self._seen:
            self._consume(token)

    def _check_time(self, started: float) -> None:
        if time.thread_time() - started > _TOKEN_SECONDS:
            raise ConstraintFailed("the grammar can't be followed: a token takes too long; make it simpler")

    def _failed(self) -> ConstraintFailed:
        lines = self._matcher.get_error().splitlines()
        return ConstraintFailed(
            f"the grammar can't be followed: {lines[0][:200] if lines else 'it is in error'}"
        )
