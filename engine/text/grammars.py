"""Compiles what a reply must be, once for all that ask for it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from engine.errors import RequestError
from engine.text.grammar_matcher import CompiledGrammar
from engine.text.grammar_source import GrammarSpec, grammar_of
from engine.text.grammar_trial import Trial, TrialLimits

# In the matcher's own units of work. With GBNF each character is a step of the parser, so it needs many cheap
# ones; long rows are what takes time there. Measured, a mask stays under 30 ms with these.
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
_GBNF_LIMITS = {**_LIMITS, "max_items_in_row": 1_000, "step_max_items": 400_000}
_MASK_SECONDS = 0.05  # in the trial; what takes longer there is refused
_REFUSAL_WEIGHT = 4 << 10


class TokenTable(NamedTuple):
    """What a grammar must know of a vocabulary.

    `tokens` are the bytes of each id, `special_ids` the control tokens, which only their id stands for, and
    `control_tokens` their spellings. `encode` gives the ids of text inside a reply.
    """

    tokens: Sequence[bytes]
    special_ids: Sequence[int]
    control_tokens: Mapping[str, int]
    eos_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]


class Grammars:
    """The grammars of one vocabulary, compiled when first asked for and kept while they fit.

    `table` is called once, when first needed. At most `capacity` grammars of at most `memory` bytes are kept,
    the last used longest. Safe in several threads at once.
    """

    def __init__(
        self,
        table: Callable[[], TokenTable],
        *,
        capacity: int = 256,
        memory: int = 512 << 20,
        trial: TrialLimits | None = None,
    ) -> None:
        self._make_table = table
        self._capacity, self._memory = capacity, memory
        self._trial_limits = trial or TrialLimits()
        self._trial = Trial(self._child_setup, self._trial_limits)
        self._table_lock = threading.Lock()
        self._made: tuple[TokenTable, LLTokenizer] | None = None
        self._lock = threading.Lock()
        self._kept: OrderedDict[GrammarSpec, CompiledGrammar | str] = OrderedDict()
        self._coming: dict[GrammarSpec, Future[CompiledGrammar | str]] = {}

    def find(self, spec: GrammarSpec, *, param: str | None = None) -> CompiledGrammar | None:
        """The grammar if it is compiled already, else None; never waits. Raises RequestError if it is bad."""
        with self._lock:
            found = self._kept.get(spec)
            if found is None or (isinstance(found, CompiledGrammar) and found.worn):
                return None
            self._kept.move_to_end(spec)
        if isinstance(found, str):
            raise RequestError(found, param=param)
        return found

    def compile(self, spec: GrammarSpec, *, param: str | None = None) -> CompiledGrammar:
        """Return the compiled grammar; blocks while it is being compiled, here or by another caller.

        Raises RequestError naming `param` where it is bad, can't be enforced or takes too much, Overloaded
        where too many others are being compiled.
        """
        found, coming, mine = self._find(spec)
        if found is None:
            if mine:
                self._fulfil(spec, coming)
            found = coming.result()
        if isinstance(found, str):
            raise RequestError(found, param=param)
        return found

    def warm(self) -> None:
        """Make ready what the first grammar would wait for: the token table and the child process."""
        self.compile(GrammarSpec("json_schema", '{"type":"object"}'))

    def close(self) -> None:
        """End the child process."""
        self._trial.close()

    def _find(
        self, spec: GrammarSpec
    ) -> tuple[CompiledGrammar | str | None, Future[CompiledGrammar | str], bool]:
        """What is kept of a spec, else the future of its compiling and whether that falls to this caller."""
        with self._lock:
            found = self._kept.get(spec)
            if found is not None and (isinstance(found, str) or not found.worn):
                self._kept.move_to_end(spec)
                return found, Future(), False
            if spec in self._coming:
                return None, self._coming[spec], False
            self._coming[spec] = Future()
            return None, self._coming[spec], True

    def _fulfil(self, spec: GrammarSpec, coming: Future[CompiledGrammar | str]) -> None:
        with self._lock:
            worn = self._kept.get(spec)
        try:
            made = worn.renewed() if isinstance(worn, CompiledGrammar) else self._compile(spec)
        except BaseException as error:
            with self._lock:
                del self._coming[spec]
            coming.set_exception(error)
            return
        with self._lock:
            del self._coming[spec]
            self._kept[spec] = made
            self._kept.move_to_end(spec)
            self._shrink()
        coming.set_result(made)

    def _shrink(self) -> None:
        def weight(kept: CompiledGrammar | str) -> int:
            return _REFUSAL_WEIGHT if isinstance(kept, str) else kept.weight

        total = sum(weight(kept) + len(spec.text) for spec, kept in self._kept.items())
        while len(self._kept) > self._capacity or (total > self._memory and len(self._kept) > 1):
            spec, kept = self._kept.popitem(last=False)
            total -= weight(kept) + len(spec.text)

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar | str:
        """The grammar, or why it is refused: a bad one that comes again costs nothing."""
        table, tokenizer = self._tokenizer()
        if not table.eos_ids:
            return "this model has no token that ends a reply, so nothing can be demanded of its form"
        limits = _GBNF_LIMITS if spec.kind == "gbnf" else _LIMITS
        try:
            grammar = grammar_of(spec, table.control_tokens)
            seconds = self._trial.run(grammar, limits)
        except RequestError as error:
            return str(error)

        def build() -> LLMatcher:
            return LLMatcher(tokenizer, grammar, limits=LLParserLimits(**limits), log_level=0)

        return CompiledGrammar(spec.source, build, table.eos_ids, len(grammar), seconds)

    def _tokenizer(self) -> tuple[TokenTable, LLTokenizer]:
        with self._table_lock:
            if self._made is None:
                table = self._make_table()
                ends = list(table.eos_ids) or None
                vocabulary = _Vocabulary(table)
                tokenizer = LLTokenizer(
                    TokenizerWrapper(vocabulary), n_vocab=len(table.tokens), eos_token=ends
                )
                vocabulary.tokenizer = tokenizer
                self._made = table, tokenizer
            return self._made

    def _child_setup(self) -> dict[str, Any]:
        table, _ = self._tokenizer()
        return {
            "tokens": [token.decode("latin-1") for token in table.tokens],
            "special_ids": list(table.special_ids),
            "eos_ids": list(table.eos_ids),
            "seconds": self._trial_limits.cpu,
            "mask_seconds": _MASK_SECONDS,
        }


class _Vocabulary:
    """A token table as the matcher wants it."""

    def __init__(self, table: TokenTable) -> None:
        self.tokens = table.tokens
        self.special_token_ids = table.special_ids
        self.eos_token_id = table.eos_ids[0] if table.eos_ids else 0
        self.bos_token_id = None
        self.tokenizer: LLTokenizer | None = None
        self._encode = table.encode

    def __call__(self, text: bytes) -> list[int]:
        """Ids of text that the grammar leaves no choice about. They must spell all of it."""
        if self.tokenizer is None:
            return []
        spelled = text.decode()
        ids = self._encode(spelled)
        if b"".join(self.tokens[i] for i in ids) == text:
            return ids
        return self.tokenizer.greedy_tokenize(spelled)  # the model's own tokenizer changes this text
