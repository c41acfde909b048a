"""The scheduler: which rows run next, over which pages, and what follows from a step.

    submit / stop  ->  plan  ->  (the runner)  ->  commit | fail  ->  take_events

Synchronous and deterministic given arrivals and measured costs. At most one step is in flight: between `plan`
and `commit` only `submit` and `stop` may be called.

A cold prefix is computed once. A waiting sequence whose next tokens a running one is about to compute waits
for it, holding nothing, and matches again once those rows are committed or their owner has stopped, so a
follower never reads what a failed step wrote.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from engine.cache.node import Match
from engine.cache.pool import PagePool
from engine.cache.tree import PrefixTree
from engine.plan import StepCosts, StepPlan, StepResult
from engine.scheduling.assemble import Chunk, assemble
from engine.scheduling.cascade import CascadePlanner
from engine.scheduling.counters import Counters
from engine.scheduling.limits import Limits
from engine.scheduling.outcome import Outcome
from engine.scheduling.parking import coming, find_owner, still_parked
from engine.scheduling.policy import Pace, StepBudget
from engine.scheduling.roster import Event, Roster
from engine.scheduling.sequence import Sequence, State
from engine.scheduling.tables import PageTables
from engine.types import CacheReceipt, EngineRequest, FinishReason

SCORED_ROWS = 128
"""Most rows of a chunk whose logits are wanted: each takes the head as well."""


class Scheduler:
    """Owns all sequences, the pool and the tree: nobody else touches them.

    It decides who runs what; its `roster` says who waits and who runs, its `tables` whose pages are whose.
    """

    def __init__(self, pool: PagePool, limits: Limits, costs: StepCosts) -> None:
        if limits.context > pool.capacity * pool.page_size:
            raise ValueError("the context must fit the pool")
        if limits.align % pool.page_size:
            raise ValueError("the tile must be a multiple of the page")
        self.pool = pool
        self.tree = PrefixTree(pool)
        self.limits = limits
        self.tables = PageTables(pool, self.tree)
        self.roster = Roster(self.tables, Counters(limits.layers * limits.token_bytes))
        self.paused = False  # no request begins; those that have begun go on
        self._in_flight: StepPlan | None = None
        self._crowded = False  # the step that is being planned has no place for another
        self._next_id = 0
        self._planner = CascadePlanner(limits.rules(pool.page_size))
        self._pace = Pace(costs)
        self._outcome = Outcome(self.roster, self.tables, limits.context)

    # -- the door --------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, namespace: Hashable, seed: int) -> int:
        """Queue a request that fits the context (the engine has checked); returns its id."""
        if not 0 < len(request.prompt) < self.limits.context:
            raise ValueError(f"a prompt of {len(request.prompt)} tokens cannot be queued")
        seq = Sequence(self._next_id, request, namespace, seed)
        self._next_id += 1
        self.roster.add(seq)
        return seq.id

    def shed(self, priority: int) -> bool:
        """Refuse the last in the queue for a request of `priority`; False where nobody's is lower."""
        victim = next((s for s in reversed(self.roster.waiting) if s.receipt is None), None)
        if victim is None or victim.request.priority >= priority:
            return False
        self.roster.finish(victim, "shed")
        return True

    def stop(self, id: int, reason: FinishReason) -> None:
        """End a sequence ("abort", or "stop" when a stop string was found). Unknown ids are ignored.

        What it has computed is published. One that runs in the step in flight ends when that commits.
        """
        seq = self.roster.find(id)
        if seq is None or seq.ending is not None:
            return
        if seq.state is State.RUNNING and self._in_flight is not None:
            seq.ending = reason
            return
        self.roster.finish(seq, reason)
        self.roster.reclaim_tails()

    def preempt(self, id: int) -> None:
        """Make a running sequence wait again as if room were short (between steps); others are ignored."""
        seq = self.roster.find(id)
        if seq is not None and seq.state is State.RUNNING and self._in_flight is None:
            self.roster.preempt(seq)

    def take_events(self) -> list[Event]:
        """The deltas since the last call, in order."""
        return self.roster.take_events()

    def take_waiting(self) -> list[Sequence]:
        """Give up the sequences that have not begun, in order."""
        return self.roster.take_waiting()

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
        wipe = self.tables.take_wipe()
        plan = assemble(self.counters.steps, list(chunks.values()), self._planner, wipe)
        self.counters.steps += 1
        self._in_flight = plan
        return plan

    def _plan_decodes(self, budget: StepBudget, chunks: dict[Sequence, Chunk]) -> None:
        """One row for each sequence that generates.

        They always fit the budget: each became one in a step in which it had a row beside all others.
        """
        for seq in [s for s in self.roster.running if s.remaining == 1 and not s.prefilling]:
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
        return next((s for s in self.roster.running if s.prefilling and s not in chunks), None)

    def _make_room(self, seq: Sequence, end: int, chunks: dict[Sequence, Chunk]) -> bool:
        """Take pages up to token `end`, preempting the last in order while there are too few.

        The first running sequence is never preempted, so somebody always gets on. False if `seq` itself
        had to go.
        """
        if seq.state is not State.RUNNING:
            return False
        while self.tables.missing(seq, end) > self.tables.available:
            victim = self.roster.running[-1]
            chunks.pop(victim, None)
            if victim is self.roster.running[0]:
                self.roster.finish(victim, "length")  # alone with the whole pool, and it is full
                return False
            self.roster.preempt(victim)
            self._crowded = True
            if victim is seq:
                return False
        self.tables.grow(seq, end)
        return True

    # -- admission -------------------------------------------------------------------------------

    def _admit_waiting(
        self, budget: StepBudget, chunks: dict[Sequence, Chunk], before: Sequence | None = None
    ) -> None:
        """Admit in order of priority and arrival, all or those that come before another; who waits for
        another's prefix is passed over, who lacks room is not."""
        for seq in self.roster.waiting.copy():
            if self._crowded or (before is not None and before.rank < seq.rank):
                break
            if len(self.roster.running) >= self.limits.max_running or budget.rows_left == 0:
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
            if seq.receipt is None:
                seq.receipt = CacheReceipt(seq.prompt_len, fitting.length, self._unwritten(seq, match))
                self.counters.admitted(seq.receipt)
            chunks[seq] = self._admit(seq, fitting, rows)
            budget.add_chunk(seq.computed, rows)

    def _park(self, seq: Sequence, matched: int) -> bool:
        """Let it wait for the running sequence that is about to compute most of what follows `matched`."""
        found = find_owner(seq, matched, self.roster.running)
        if found is None:
            return False
        seq.waits_for = found
        owner = found[0]
        # Else a request that is less urgent than this one, and more than the owner, would hold up both.
        self.roster.rerank(owner, min(owner.rank, (seq.rank[0], owner.id)))
        return True

    def _fitting(self, seq: Sequence, match: Match) -> Match | None:
        """The match if there is room for the whole of `seq` now, else None.

        Room for what admitted prompts still lack, and one page for every running sequence, stay untouched.
        Alone, a sequence always fits: if need be, without the copied part of a page.
        """
        promised = sum(self.tables.missing(s, s.target) for s in self.roster.running if s.prefilling)
        reserve = promised + len(self.roster.running)
        if self.tables.cost(match, len(seq.tokens)) + reserve <= self.tables.available:
            return match
        if self.roster.running:
            return None
        whole = len(match.pages) * self.pool.page_size
        return match._replace(partial=None, partial_page=0, partial_rows=0, length=whole)

    def _admit(self, seq: Sequence, match: Match, rows: int) -> Chunk:
        if (copy := self.tables.attach(seq, match)) is not None:
            self.counters.copied_rows += copy.rows
        seq.target = len(seq.tokens)
        self.roster.admit(seq)
        self.tables.grow(seq, seq.computed + rows)
        return Chunk(seq, rows, copy)

    def _unwritten(self, seq: Sequence, match: Match) -> int:
        """Tokens of a prompt that begins now which nobody has stored or is about to store."""
        # One that may not wait for others computes what they do, but stores nothing new by that.
        return seq.prompt_len - coming(seq, self._stored(seq, match), self.roster.running)

    def _stored(self, seq: Sequence, match: Match) -> int:
        """Tokens of a prompt that the cache holds; `match` is what was found of those it may use."""
        if match.length < seq.match_limit():
            return match.length  # tokens ended the match, so a longer look ends there too
        return self.tree.match(seq.namespace, seq.request.prompt, seq.prompt_len).length

    # -- after the step --------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Take over what the step computed: publish pages, append tokens, end what has ended."""
        self._land(plan)
        self._pace.learn(plan, result.seconds)
        self._outcome.commit(plan, result)

    def fail(self, plan: StepPlan, message: str) -> None:
        """The step raised: the sequences it ran end with an error, and nothing of it is kept."""
        self._land(plan)
        self._outcome.fail(plan, message)

    def _land(self, plan: StepPlan) -> None:
        if plan is not self._in_flight:
            raise RuntimeError("this step is not in flight")
        self._in_flight = None
        self.tables.landed()

    # -- state -----------------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        """What was done so far; a scheduler that takes another's place goes on with the other's."""
        return self.roster.counters

    @counters.setter
    def counters(self, counters: Counters) -> None:
        self.roster.counters = counters

    @property
    def waiting(self) -> int:
        return len(self.roster.waiting)

    @property
    def running(self) -> int:
        return len(self.roster.running)

    @property
    def admitted(self) -> int:
        """Sequences that have begun, preempted ones included."""
        return self.roster.admitted

    @property
    def idle(self) -> bool:
        return len(self.roster) == 0

    def private_pages(self) -> Iterator[int]:
        """Pages that stand in one table only."""
        for seq in self.roster.running:
            yield from self.tables.private_pages(seq)

    @property
    def pinned_pages(self) -> int:
        """Pages that nobody else may take now."""
        return self.pool.capacity - self.tables.available

    def check(self) -> None:
        """Raise AssertionError where an invariant of pool, tree or tables is broken (between steps)."""
        self.tree.check(self.private_pages())
        for seq in self.roster.running:
            path: list[int] = []
            node = seq.node
            while node is not None:
                path[:0] = node.pages
                node = node.parent
            assert path == seq.table[: seq.shared].tolist(), f"{seq} and its path in the tree differ"


def _most_rows(seq: Sequence, start: int) -> int:
    """Rows that a chunk of `seq` from token `start` on may have at most."""
    rows = len(seq.tokens) - start
    score = seq.next_score
    return rows if score is None else min(rows, score - 1 - start + SCORED_ROWS)
