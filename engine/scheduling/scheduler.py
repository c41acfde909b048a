"""The scheduler: which rows run next, over which pages, and what follows from a step.

    submit / stop  ->  plan  ->  (the runner)  ->  commit | fail  ->  take_events

Synchronous and deterministic given arrivals and measured costs. At most one step is in flight: between `plan`
and `commit` only `submit` and `stop` may be called.

A cold prefix is computed once. A waiting sequence whose next tokens a running one is about to compute waits
for it, holding nothing, and matches again once those rows are committed or their owner has stopped, so a
follower never reads what a failed step wrote.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable, Iterator
from typing import Literal, NamedTuple

from engine.cache.node import Match, Node
from engine.cache.pool import PagePool
from engine.cache.tree import PrefixTree
from engine.errors import ConstraintFailed
from engine.plan import StepCosts, StepPlan, StepResult
from engine.scheduling.assemble import Chunk, assemble
from engine.scheduling.cascade import CascadePlanner
from engine.scheduling.counters import Counters
from engine.scheduling.limits import Limits
from engine.scheduling.parking import coming, find_owner, still_parked
from engine.scheduling.policy import Pace, StepBudget
from engine.scheduling.sequence import Sequence, State, own_rank
from engine.scheduling.tables import PageTables
from engine.types import CacheReceipt, Delta, EngineRequest, FinishReason, TokenLogprob

SCORED_ROWS = 128
"""Most rows of a chunk whose logits are wanted: each takes the head as well."""


class Event(NamedTuple):
    """A delta for the stream of sequence `id`."""

    id: int
    delta: Delta


class Scheduler:
    """Owns all sequences; the pool and the tree are touched by nobody else."""

    def __init__(self, pool: PagePool, limits: Limits, costs: StepCosts) -> None:
        if limits.context > pool.capacity * pool.page_size:
            raise ValueError("the context must fit the pool")
        if limits.align % pool.page_size:
            raise ValueError("the tile must be a multiple of the page")
        self.pool = pool
        self.tree = PrefixTree(pool)
        self.limits = limits
        self.tables = PageTables(pool, self.tree)
        self.counters = Counters(limits.layers * limits.token_bytes)
        self.paused = False  # no request begins; those that have begun go on
        self._sequences: dict[int, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._events: list[Event] = []
        self._copy_sources: list[Node] = []
        self._wipe: list[int] = []
        self._in_flight: StepPlan | None = None
        self._crowded = False  # the step that is being planned has no place for another
        self._next_id = 0
        self._planner = CascadePlanner(limits.rules(pool.page_size))
        self._pace = Pace(costs)

    # -- the door --------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, namespace: Hashable, seed: int) -> int:
        """Queue a request that fits the context (the engine has checked); returns its id."""
        if not 0 < len(request.prompt) < self.limits.context:
            raise ValueError(f"a prompt of {len(request.prompt)} tokens cannot be queued")
        seq = Sequence(self._next_id, request, namespace, seed)
        self._next_id += 1
        self._sequences[seq.id] = seq
        insort(self._waiting, seq, key=_rank)
        return seq.id

    def shed(self, priority: int) -> bool:
        """Refuse the last in the queue for a request of `priority`; False where nobody's is lower."""
        victim = next((s for s in reversed(self._waiting) if s.receipt is None), None)
        if victim is None or victim.request.priority >= priority:
            return False
        self._finish(victim, "shed")
        return True

    def stop(self, id: int, reason: FinishReason) -> None:
        """End a sequence ("abort", or "stop" when a stop string was found). Unknown ids are ignored.

        What it has computed is published. One that runs in the step in flight ends when that commits.
        """
        seq = self._sequences.get(id)
        if seq is None or seq.ending is not None:
            return
        if seq.state is State.RUNNING and self._in_flight is not None:
            seq.ending = reason
            return
        self._finish(seq, reason)
        self._reclaim_tails()

    def preempt(self, id: int) -> None:
        """Make a running sequence wait again as if room were short (between steps); others are ignored."""
        seq = self._sequences.get(id)
        if seq is not None and seq.state is State.RUNNING and self._in_flight is None:
            self._preempt(seq)

    def take_events(self) -> list[Event]:
        """The deltas since the last call, in order."""
        events, self._events = self._events, []
        return events

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def admitted(self) -> int:
        """Sequences that have begun, preempted ones included."""
        return sum(1 for s in self._sequences.values() if s.receipt is not None)

    @property
    def idle(self) -> bool:
        return not self._sequences

    def take_waiting(self) -> list[Sequence]:
        """Give up the sequences that have not begun, in order."""
        taken = [s for s in self._waiting if s.receipt is None]
        self._waiting = [s for s in self._waiting if s.receipt is not None]
        for seq in taken:
            del self._sequences[seq.id]
        return taken

    # -- plan ------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Choose the rows of the next step; None if nothing can run."""
        if self._in_flight is not None:
            raise RuntimeError("a step is in flight")
        budget = StepBudget(self.limits.max_step_tokens, self.limits.step_ms, self._pace.costs)
        chunks: dict[Sequence, Chunk] = {}
        self._crowded = False
        self._plan_decodes(budget, chunks)
        self._plan_prefills(budget, chunks)
        self._admit_waiting(budget, chunks)
        if not chunks:
            return None
        wipe, self._wipe = self._wipe, []
        plan = assemble(self.counters.steps, list(chunks.values()), self._planner, tuple(wipe))
        self.counters.steps += 1
        self._in_flight = plan
        return plan

    def _plan_decodes(self, budget: StepBudget, chunks: dict[Sequence, Chunk]) -> None:
        """One row for each sequence that generates.

        They always fit the budget: each became one in a step in which it had a row beside all others.
        """
        for seq in [s for s in self._running if s.remaining == 1 and not s.prefilling]:
            if self._make_room(seq, seq.computed + 1, chunks):
                budget.add_decode(seq.computed + 1)
                chunks[seq] = Chunk(seq, 1)

    def _plan_prefills(self, budget: StepBudget, chunks: dict[Sequence, Chunk]) -> None:
        """The next chunk of each admitted prompt, in order; who waits and comes before it begins first."""
        while (seq := self._next_prefill(chunks)) is not None:
            self._admit_waiting(budget, chunks, before=seq)
            seq = self._next_prefill(chunks) or seq  # one that is waited for has come forward
            rows = budget.chunk(seq.computed, _most_rows(seq, seq.computed))
            if rows == 0:
                return
            if self._make_room(seq, seq.computed + rows, chunks):
                budget.add_chunk(seq.computed, rows)
                chunks[seq] = Chunk(seq, rows)

    def _next_prefill(self, chunks: dict[Sequence, Chunk]) -> Sequence | None:
        return next((s for s in self._running if s.prefilling and s not in chunks), None)

    def _make_room(self, seq: Sequence, end: int, chunks: dict[Sequence, Chunk]) -> bool:
        """Take pages up to token `end`, preempting the last in order while there are too few.

        The first running sequence is never preempted, so somebody always gets on. False if `seq` itself
        had to go.
        """
        if seq.state is not State.RUNNING:
            return False
        while self.tables.missing(seq, end) > self.tables.available:
            victim = self._running[-1]
            chunks.pop(victim, None)
            if victim is self._running[0]:
                self._finish(victim, "length")  # alone with the whole pool, and it is full
                return False
            self._preempt(victim)
            if victim is seq:
                return False
        self.tables.grow(seq, end)
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Publish what it has and let it wait again, in its old place; its pages can now be evicted."""
        self.counters.preemptions += 1
        self._crowded = True
        self.tables.publish(seq, tail=True)
        self.tables.release(seq)
        self._running.remove(seq)
        seq.state = State.WAITING
        seq.rank = own_rank(seq)
        insort(self._waiting, seq, key=_rank)
        self._reclaim_tails()

    # -- admission -------------------------------------------------------------------------------

    def _admit_waiting(
        self, budget: StepBudget, chunks: dict[Sequence, Chunk], before: Sequence | None = None
    ) -> None:
        """Admit in order of priority and arrival, all or those that come before another; who waits for
        another's prefix is passed over, who lacks room is not."""
        admitted = []
        for seq in self._waiting:
            if self._crowded or (before is not None and before.rank < seq.rank):
                break
            if len(self._running) >= self.limits.max_running or budget.rows_left == 0:
                break
            if still_parked(seq) or (self.paused and seq.receipt is None):
                continue
            match = self.tree.match(seq.namespace, seq.tokens, seq.match_limit())
            if self._park(seq, match.length):
                continue
            rows = budget.chunk(match.length, _most_rows(seq, match.length))
            fitting = self._fitting(seq, match)
            if rows == 0 or fitting is None:
                self._crowded = True
                break
            rows = min(
                rows + match.length - fitting.length, _most_rows(seq, fitting.length), budget.rows_left
            )
            admitted.append(seq)
            chunks[seq] = self._admit(seq, fitting, rows)
            budget.add_chunk(seq.computed, rows)
        for seq in admitted:
            self._waiting.remove(seq)

    def _park(self, seq: Sequence, matched: int) -> bool:
        """Let it wait for the running sequence that is about to compute most of what follows `matched`."""
        found = find_owner(seq, matched, self._running)
        if found is None:
            return False
        seq.waits_for = found
        owner = found[0]
        # Else a request that is less urgent than this one, and more than the owner, would hold up both.
        owner.rank = min(owner.rank, (seq.rank[0], owner.id))
        self._running.sort(key=_rank)
        return True

    def _fitting(self, seq: Sequence, match: Match) -> Match | None:
        """The match if there is room for the whole of `seq` now, else None.

        Room for what admitted prompts still lack, and one page for every running sequence, stay untouched.
        Alone, a sequence always fits: if need be, without the copied part of a page.
        """
        promised = sum(self.tables.missing(s, s.target) for s in self._running if s.prefilling)
        reserve = promised + len(self._running)
        if self.tables.cost(match, len(seq.tokens)) + reserve <= self.tables.available:
            return match
        if self._running:
            return None
        whole = len(match.pages) * self.pool.page_size
        return match._replace(partial=None, partial_page=0, partial_rows=0, length=whole)

    def _admit(self, seq: Sequence, match: Match, rows: int) -> Chunk:
        copy = None
        if seq.receipt is None:
            stored = self.tree.match(seq.namespace, seq.request.prompt, seq.prompt_len).length
            # One that may not wait for others computes what they do, but stores nothing new by that.
            stored = coming(seq, stored, self._running)
            seq.receipt = CacheReceipt(seq.prompt_len, match.length, seq.prompt_len - stored)
            self.counters.admitted(seq.receipt)
        if (attached := self.tables.attach(seq, match)) is not None:
            copy, source = attached
            self._copy_sources.append(source)
            self.counters.copied_rows += copy.rows
        seq.state = State.RUNNING
        seq.target = len(seq.tokens)
        insort(self._running, seq, key=_rank)
        self.tables.grow(seq, seq.computed + rows)
        return Chunk(seq, rows, copy)

    # -- after the step --------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Take over what the step computed: publish pages, append tokens, end what has ended."""
        self._land(plan)
        self._pace.learn(plan, result.seconds)
        self.counters.ran(plan, result)
        samples = {index: j for j, index in enumerate(plan.sample_sequences)}
        scores = {row.sequence: found for row, found in zip(plan.scores, result.scores, strict=True)}
        for index, id in enumerate(plan.sequence_ids):
            seq = self._sequences[id]
            if index in result.bad:
                self._fail_sequence(seq, "the model gave a number that is not finite")
                continue
            self._advance(seq, int(plan.row_indptr[index + 1] - plan.row_indptr[index]))
            seq.scored += scores.get(index, ())
            if seq.ending is not None:
                self._finish(seq, seq.ending)
            elif index in samples:
                self._take_sample(seq, result, samples[index])
            elif seq.remaining == 0:
                self._finish(seq, "length")  # max_tokens 0: the prompt was all there was to run
        self._settle()

    def fail(self, plan: StepPlan, message: str) -> None:
        """The step raised: the sequences it ran end with an error, and nothing of it is kept."""
        self._land(plan)
        self._wipe += plan.wipe  # it may have raised before it wiped; these pages are free again by the end
        self.counters.failed_steps += 1
        for id in plan.sequence_ids:
            self._fail_sequence(self._sequences[id], message)
        self._settle()

    def _land(self, plan: StepPlan) -> None:
        if plan is not self._in_flight:
            raise RuntimeError("this step is not in flight")
        self._in_flight = None
        for node in self._copy_sources:
            self.tree.unpin(node)
        self._copy_sources.clear()

    def _advance(self, seq: Sequence, rows: int) -> None:
        was_prefill = seq.prefilling
        self.counters.recomputed_rows += max(0, min(seq.high_water, seq.computed + rows) - seq.computed)
        seq.computed += rows
        seq.high_water = max(seq.high_water, seq.computed)
        if was_prefill and not seq.prefilling and seq.rank != own_rank(seq):
            seq.rank = own_rank(seq)  # nobody waits for its rows any more
            self._running.sort(key=_rank)
        if was_prefill or seq.computed % self.pool.page_size == 0:
            self.tables.publish(seq, tail=was_prefill)

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
            self._fail_sequence(seq, error, fault="constraint")

    def _append(self, seq: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        params, constraint = seq.request.params, seq.request.constraint
        ends = token in params.stop_token_ids and not params.ignore_eos
        if constraint is not None and not ends:
            # The grammar's end is the reply's: a token that only says so is not worth a step.
            ends = constraint.complete([*seq.tokens[seq.prompt_len :], token])
        seq.tokens.append(token)
        self.counters.generated_tokens += 1
        reason: FinishReason | None = None
        if ends:
            reason = "stop"
        elif seq.generated >= params.max_tokens or len(seq.tokens) >= self.limits.context:
            reason = "length"
        self._emit(seq, (token,), () if logprob is None else (logprob,), reason)
        if reason is not None:
            self._retire(seq, reason)

    def _settle(self) -> None:
        """What other events of this commit decided for sequences that were not in the step."""
        for seq in list(self._running):
            if seq.ending is not None:
                self._finish(seq, seq.ending)
        self._reclaim_tails()

    def _reclaim_tails(self) -> None:
        """What was published just now may have covered the tails of others."""
        for seq in self._running:
            self.tables.reclaim(seq)

    # -- endings ---------------------------------------------------------------------------------

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        self._emit(seq, (), (), reason)
        self._retire(seq, reason)

    def _retire(self, seq: Sequence, reason: FinishReason) -> None:
        """Take a sequence out; what it has computed stays in the tree."""
        if seq.state is State.RUNNING:
            self.tables.publish(seq, tail=True)
            self.tables.release(seq)
        self._remove(seq, reason)

    def _fail_sequence(
        self, seq: Sequence, message: str, fault: Literal["step", "constraint"] = "step"
    ) -> None:
        self._emit(seq, (), (), "error", message, fault)
        self._wipe += self.tables.discard(seq)
        self._remove(seq, "error")

    def _remove(self, seq: Sequence, reason: FinishReason) -> None:
        (self._running if seq.state is State.RUNNING else self._waiting).remove(seq)
        seq.state = State.FINISHED
        seq.waits_for = None
        del self._sequences[seq.id]
        self.counters.finished[reason] += 1

    def _emit(
        self,
        seq: Sequence,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        reason: FinishReason | None,
        error: str | None = None,
        fault: Literal["step", "constraint"] = "step",
    ) -> None:
        first = seq.generated == len(tokens)
        receipt = seq.receipt if first or reason is not None else None
        delta = Delta(
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=reason,
            receipt=receipt,
            error=error,
            fault=fault,
            prompt_rows=0 if reason is None else seq.prompt_rows,
            prompt_logprobs=tuple(seq.scored) if first and seq.next_score is None else (),
        )
        self._events.append(Event(seq.id, delta))

    # -- state -----------------------------------------------------------------------------------

    def private_pages(self) -> Iterator[int]:
        """Pages that stand in one table only."""
        for seq in self._running:
            yield from self.tables.private_pages(seq)

    @property
    def pinned_pages(self) -> int:
        """Pages that nobody else may take now."""
        return self.pool.capacity - self.tables.available

    def check(self) -> None:
        """Raise AssertionError where an invariant of pool, tree or tables is broken (between steps)."""
        self.tree.check(self.private_pages())
        for seq in self._running:
            path: list[int] = []
            node = seq.node
            while node is not None:
                path[:0] = node.pages
                node = node.parent
            assert path == seq.table[: seq.shared].tolist(), f"{seq} and its path in the tree differ"


def _rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank


def _most_rows(seq: Sequence, start: int) -> int:
    """Rows that a chunk of `seq` from token `start` on may have at most."""
    rows = len(seq.tokens) - start
    score = seq.next_score
    return rows if score is None else min(rows, score - 1 - start + SCORED_ROWS)
