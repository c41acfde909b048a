"""Who waits and who runs, in order; how sequences leave, and what their streams are told."""

from __future__ import annotations

from bisect import insort
from typing import Literal, NamedTuple

from engine.scheduling.counters import Counters
from engine.scheduling.sequence import Sequence, State, own_rank
from engine.scheduling.tables import PageTables
from engine.types import Delta, FinishReason, TokenLogprob


class Event(NamedTuple):
    """A delta for the stream of sequence `id`."""

    id: int
    delta: Delta


class Roster:
    """All sequences that have not ended. The only writer of `Sequence.state` and `rank`, and of the two
    lists, which others read: `waiting` and `running`, each in order of rank."""

    def __init__(self, tables: PageTables, counters: Counters) -> None:
        self.counters = counters
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._tables = tables
        self._by_id: dict[int, Sequence] = {}
        self._events: list[Event] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, id: int) -> Sequence:
        return self._by_id[id]

    def find(self, id: int) -> Sequence | None:
        """The sequence of that id, None where it has ended or never was."""
        return self._by_id.get(id)

    @property
    def admitted(self) -> int:
        """Sequences that have begun, preempted ones included."""
        return sum(1 for s in self._by_id.values() if s.receipt is not None)

    def take_events(self) -> list[Event]:
        """The deltas since the last call, in order."""
        events, self._events = self._events, []
        return events

    # -- places ----------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        self._by_id[seq.id] = seq
        insort(self.waiting, seq, key=_rank)

    def take_waiting(self) -> list[Sequence]:
        """Give up the sequences that have not begun, in order."""
        taken = [s for s in self.waiting if s.receipt is None]
        self.waiting = [s for s in self.waiting if s.receipt is not None]
        for seq in taken:
            del self._by_id[seq.id]
        return taken

    def admit(self, seq: Sequence) -> None:
        """From the queue to those that run; the caller has attached its pages."""
        self.waiting.remove(seq)
        seq.state = State.RUNNING
        insort(self.running, seq, key=_rank)

    def preempt(self, seq: Sequence) -> None:
        """Publish what it has and let it wait again, in its old place; its pages can now be evicted."""
        self.counters.preemptions += 1
        self._tables.publish(seq, tail=True)
        self._tables.release(seq)
        self.running.remove(seq)
        seq.state = State.WAITING
        seq.rank = own_rank(seq)
        insort(self.waiting, seq, key=_rank)
        self.reclaim_tails()

    def rerank(self, seq: Sequence, rank: tuple[int, int]) -> None:
        """Change the place of one that runs."""
        if rank != seq.rank:
            seq.rank = rank
            self.running.sort(key=_rank)

    def reclaim_tails(self) -> None:
        """What was published just now may have covered the tails of others."""
        for seq in self.running:
            self._tables.reclaim(seq)

    # -- endings ---------------------------------------------------------------------------------

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence that has nothing more to say; what it has computed stays in the tree."""
        self._emit(seq, reason=reason)
        self._retire(seq, reason)

    def fail(self, seq: Sequence, message: str, fault: Literal["step", "constraint"] = "step") -> None:
        """End a running sequence with an error; what it has not yet put into the tree is thrown away."""
        self._emit(seq, reason="error", error=message, fault=fault)
        self._tables.discard(seq)
        self._remove(seq, "error")

    def deliver(
        self, seq: Sequence, token: int, logprob: TokenLogprob | None, reason: FinishReason | None
    ) -> None:
        """Tell the newest token of a sequence; it ends with it where there is a reason."""
        self._emit(seq, (token,), () if logprob is None else (logprob,), reason)
        if reason is not None:
            self._retire(seq, reason)

    def _retire(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.state is State.RUNNING:
            self._tables.publish(seq, tail=True)
            self._tables.release(seq)
        self._remove(seq, reason)

    def _remove(self, seq: Sequence, reason: FinishReason) -> None:
        (self.running if seq.state is State.RUNNING else self.waiting).remove(seq)
        seq.state = State.FINISHED
        seq.waits_for = None
        del self._by_id[seq.id]
        self.counters.finished[reason] += 1

    def _emit(
        self,
        seq: Sequence,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        reason: FinishReason | None = None,
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


def _rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank
