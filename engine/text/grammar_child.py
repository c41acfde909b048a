"""Compiles grammars where they can do no harm: in a process with bounded time, memory and stack.

It runs as a script of its own and imports nothing of Headwater's. The first line it reads is the vocabulary
and the time limits, every other one a grammar; it answers each with one line. A grammar that takes too much
ends this process, by the system's hand: that is the answer then.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import threading
import time
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

_STACK = 1 << 20  # bytes; what compiles in this little can't overflow a thread of the server
_TRIAL_TOKENS = 64


class Vocabulary:
    """The vocabulary as the matcher wants it."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.tokens = [token.encode("latin-1") for token in setup["tokens"]]
        self.special_token_ids = setup["special_ids"]
        self.eos_token_id = setup["eos_ids"][0]
        self.bos_token_id = None
        self.tokenizer: LLTokenizer | None = None

    def __call__(self, text: bytes) -> list[int]:
        """Ids of text that the grammar leaves no choice about. They must spell all of it."""
        return self.tokenizer.greedy_tokenize(text.decode()) if self.tokenizer else []


class Trial:
    """Compiles a grammar and follows it along a random path."""

    def __init__(self, setup: dict[str, Any]) -> None:
        vocabulary = Vocabulary(setup)
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(vocabulary), n_vocab=len(setup["tokens"]), eos_token=setup["eos_ids"]
        )
        vocabulary.tokenizer = self._tokenizer
        self._seconds = setup["seconds"]
        self._mask_seconds = setup["mask_seconds"]
        self._ends = frozenset(setup["eos_ids"])

    def run(self, grammar: str, limits: dict[str, Any]) -> dict[str, Any]:
        """Return the error, or None, and the CPU seconds that compiling took."""
        signal.setitimer(signal.ITIMER_PROF, self._seconds)  # its signal ends the process
        started = time.process_time()
        matcher = LLMatcher(self._tokenizer, grammar, limits=LLParserLimits(**limits), log_level=0)
        seconds = time.process_time() - started
        error = matcher.get_error() or self._follow(matcher)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        return {"error": error or None, "seconds": seconds}

    def _follow(self, matcher: LLMatcher) -> str:
        choose = random.Random(0)
        for _ in range(_TRIAL_TOKENS):
            started = time.process_time()
            mask = matcher.compute_bitmask()
            if matcher.is_error():
                return "follow: " + matcher.get_error()
            if time.process_time() - started > self._mask_seconds:
                return "follow: a token takes too long"
            token = self._some_token(mask, choose)
            if token is None:
                break
            if not matcher.consume_token(token):
                return "follow: " + matcher.get_error()
        return ""

    def _some_token(self, mask: bytes, choose: random.Random) -> int | None:
        """A token that is allowed and doesn't end the text, or None."""
        start = choose.randrange(len(mask) * 8)
        everything = int.from_bytes(mask, "little")
        for offset, bits in ((start, everything >> start), (0, everything)):
            while bits:
                token = offset + (bits & -bits).bit_length() - 1
                if token not in self._ends:
                    return token
                bits &= bits - 1
        return None


def serve() -> None:
    """Answer until the input ends."""
    trial = Trial(json.loads(sys.stdin.buffer.readline()))
    for line in sys.stdin.buffer:
        answer = trial.run(**json.loads(line))
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def main() -> None:
    """Serve from a thread with a small stack, within bounded memory."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):
        pass  # then time alone bounds it
    threading.stack_size(_STACK)
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
