"""Plain data that crosses the engine's border: requests in, deltas out.

Everything here is a msgspec struct without behaviour worth mentioning, so that an engine can live in
another process without change. A request's constraint is the one exception: whoever carries requests
elsewhere sends its `source` and has it compiled there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

FinishReason = Literal["stop", "length", "abort", "error", "shed"]
"""How a sequence ended. "shed": it had not begun when a request of higher priority needed its place."""


class Namespace(msgspec.Struct, frozen=True):
    """Who may share cached pages: a path of typed parts below the engine's own model part.

    Absent (None) differs from empty (""). The engine puts the numerics fingerprint and the weight
    version in front, so a reload or another executor never matches old pages.
    """

    account: str | None = None
    isolation_key: str | None = None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one sequence are chosen.

    temperature 0 is greedy, ties going to the lowest id. `top_k` 0 is off, as are `typical_p` 1 and
    `mirostat_target` 0. `seed` None means that the engine draws one. `stop_token_ids` end the sequence with
    "stop" (the token counts as generated and is delivered, its text is not shown by the codec);
    `ignore_eos` clears them; the first `min_tokens` tokens are none of them. `logprobs` None is off; k >= 0
    reports the chosen token and the k likeliest, as log-softmax of the raw fp32 logits, before any of the
    changes below.

    Logits are changed in this order: `logit_bias` is added (token id, bias); `repetition_penalty` (1 is
    off) divides the positive and multiplies the negative logits of tokens in the prompt or the output;
    `frequency_penalty` times the count, and `presence_penalty` once, are taken off tokens of the output.

    `mirostat_target` is a perplexity: each token is drawn among those whose surprise is at most a bound,
    which follows the target at rate `mirostat_lr` (Basu et al. 2020, in its second form, where the bound
    starts at twice the target surprise).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    typical_p: float = 1.0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    mirostat_target: float = 0.0
    mirostat_lr: float = 0.1


class Constraint(Protocol):
    """What one sequence may generate: a grammar and how far it has come. Made by TextCodec, one a sequence.

    It follows the tokens by itself, so a repeated, preempted or failed step asks again and gets the same.
    What it is told only ever grows, often as one and the same list: it looks at what is new, and neither
    changes nor keeps the list. Used by one thread at a time.
    """

    @property
    def source(self) -> str:
        """What it was compiled from, as plain text."""

    def mask(self, generated: Sequence[int]) -> bytes:
        """Which tokens may follow the generated ones (all of them so far, prompt left out).

        Little-endian bits, one a token id, set where allowed, at least as many as the vocabulary has. At
        the end of the grammar only end tokens are allowed. Raises ConstraintFailed where the grammar has
        become too complex to follow, or the tokens have left it.
        """

    def complete(self, generated: Sequence[int]) -> bool:
        """Whether nothing but an end token can follow."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to run: prompt token ids and how to go on from them.

    `request_id` is only for logs: the engine has ids of its own. `cache_max_len` caps the matched
    prefix in tokens (0: neither match nor wait for another's computation; the KV is still published).
    `prompt_index` and `choice_index` key the random numbers beside the seed and the output position.

    `prompt_logprobs` k >= 0 reports, for each prompt token from position `prompt_logprobs_from` on, its own
    log-probability and the k likeliest. Rows whose logits that takes are run again even where their KV is
    cached. Higher `priority` goes first, and is preempted and refused last.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    namespace: Namespace = Namespace()
    cache_max_len: int | None = None
    prompt_index: int = 0
    choice_index: int = 0
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 0
    priority: int = 0
    constraint: Constraint | None = None


class CacheReceipt(msgspec.Struct, frozen=True):
    """What the cache did for one request, frozen when its first own chunk is scheduled.

    prompt_tokens = cached_tokens + computed_tokens, whatever happens afterwards. Of the computed tokens
    `written_tokens` were not in the cache: the rest is run again for its logits, or because the request may
    not use what is there.
    """

    prompt_tokens: int
    cached_tokens: int
    written_tokens: int = 0

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """Log-probability of one token, generated or of the prompt, and the likeliest there, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream yields: one or more new tokens, or the end.

    The first delta, and the one with a finish reason, carry the receipt (None only where the request
    ended before it was ever scheduled). Nothing follows a delta with a finish reason. `error` is a
    message, set with finish reason "error"; `fault` says whose fault that was, the step's or the
    constraint's. `prompt_rows` comes with a finish reason: how many of the prompt's computed tokens were
    really run, fewer than the receipt's where it ended in prefill.
    `prompt_logprobs`, where asked for, comes whole with the first delta of a finished prefill: one entry
    a prompt token from the first one asked for; None for the very first token, which nothing predicts.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    receipt: CacheReceipt | None = None
    error: str | None = None
    fault: Literal["step", "constraint"] = "step"
    prompt_rows: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a started engine is: shown by /v1/models, the start banner and metrics."""

    model: str
    dtype: str
    executor: str
    threads: int
    context_length: int
    vocab_size: int
    page_size: int
    num_pages: int
    kv_bytes: int
    num_layers: int = 1
    fingerprint: str
    bit_identical: bool
    notes: tuple[str, ...] = ()


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the engine's gauges and counters. Counters never fall while the process lives."""

    running: int
    waiting: int
    free_pages: int
    evictable_pages: int
    pinned_pages: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    computed_rows: int
    recomputed_rows: int
    steps: int
    failed_steps: int
    preemptions: int
    evicted_pages: int
    collapsed_pages: int
    copied_rows: int
    cascade_steps: int
    cascade_groups: int
    cascade_rows: int
    cascade_levels: int
    cascade_refused: int
    kv_bytes_read: int
    kv_bytes_saved: int
    verified_steps: int
    differing_steps: int
    finished: dict[str, int]
