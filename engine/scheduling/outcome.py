"""What follows from a step for the sequences that were in it: rows that count, tokens, endings."""

from __future__ import annotations

from engine.errors import ConstraintFailed
from engine.plan import StepPlan, StepResult
from engine.scheduling.roster import Roster
from engine.scheduling.sequence import Sequence, own_rank
from engine.scheduling.tables import PageTables
from engine.types import FinishReason, TokenLogprob


class Outcome:
    """Carries over what steps give; has no state of its own. `context` is the most tokens of a sequence.

    The only writer of `Sequence.tokens`, `past`, `high_water`, `scored` and `bound`.
    """

    def __init__(self, roster: Roster, tables: PageTables, context: int) -> None:
        self._roster = roster
        self._tables = tables
        self._context = context

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Publish pages, append tokens, end what has ended."""
        self._roster.counters.ran(plan, result)
        samples = {index: j for j, index in enumerate(plan.sample_sequences)}
        scores = {row.sequence: found for row, found in zip(plan.scores, result.scores, strict=True)}
        for index, seq in enumerate(self._ran(plan)):
            if index in result.bad:
                self._roster.fail(seq, "the model gave a number that is not finite")
                continue
            self._advance(seq, int(plan.row_indptr[index + 1] - plan.row_indptr[index]))
            seq.scored += scores.get(index, ())
            if seq.ending is not None:
                self._roster.finish(seq, seq.ending)
            elif index in samples:
                self._take_sample(seq, result, samples[index])
            elif seq.remaining == 0:
                self._roster.finish(seq, "length")  # max_tokens 0: the prompt was all there was to run
        self._settle()

    def fail(self, plan: StepPlan, message: str) -> None:
        """The sequences of a step that raised end with an error, and nothing of it is kept."""
        self._tables.wipe += plan.wipe  # it may have raised before it wiped; these pages are free by the end
        self._roster.counters.failed_steps += 1
        for seq in self._ran(plan):
            self._roster.fail(seq, message)
        self._settle()

    def _ran(self, plan: StepPlan) -> list[Sequence]:
        """The sequences of a plan, in its order. None of them ends while its step is in flight."""
        return [self._roster[id] for id in plan.sequence_ids]

    def _advance(self, seq: Sequence, rows: int) -> None:
        was_prefill = seq.prefilling
        again = max(0, min(seq.high_water, seq.computed + rows) - seq.computed)
        self._roster.counters.recomputed_rows += again
        seq.computed += rows
        seq.high_water = max(seq.high_water, seq.computed)
        if was_prefill and not seq.prefilling:
            self._roster.rerank(seq, own_rank(seq))  # nobody waits for its rows any more
        if was_prefill or seq.computed % self._tables.pool.page_size == 0:
            self._tables.publish(seq, tail=was_prefill)

    def _take_sample(self, seq: Sequence, result: StepResult, sample: int) -> None:
        """Append the token that was chosen, or end the sequence where none could be."""
        error = result.errors.get(sample)
        if error is None:
            if result.bounds:
                seq.bound = result.bounds[sample]
            try:
                self._append(seq, result.tokens[sample], result.logprobs[sample])
            except ConstraintFailed as failure:
                error = str(failure)
        if error is not None:
            self._roster.fail(seq, error, fault="constraint")

    def _append(self, seq: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        params, constraint = seq.request.params, seq.request.constraint
        ends = token in params.stop_token_ids and not params.ignore_eos
        if seq.past is not None:
            seq.past.append(token)
            if constraint is not None and not ends:
                # The grammar's end is the reply's: a token that only says so is not worth a step.
                ends = constraint.complete(seq.past.generated)
        seq.tokens.append(token)
        self._roster.counters.generated_tokens += 1
        reason: FinishReason | None = None
        if ends:
            reason = "stop"
        elif seq.generated >= params.max_tokens or len(seq.tokens) >= self._context:
            reason = "length"
        self._roster.deliver(seq, token, logprob, reason)

    def _settle(self) -> None:
        """What other events of this commit decided for sequences that were not in the step."""
        for seq in list(self._roster.running):
            if seq.ending is not None:
                self._roster.finish(seq, seq.ending)
        self._roster.reclaim_tails()
