"""A runner without a model: KV memory in which every row says whose token it is.

Each (page, row) holds the number of one (namespace, token prefix up to and including that token). A step is
carried out as its plan says, and every row that is attended to must hold exactly its reader's own prefix.
What a sequence's tokens are is told from outside (`truth`), so that the scheduler can't vouch for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from engine.errors import ConstraintFailed
from engine.plan import CascadeLevel, SampleRow, StepPlan, StepResult, needs_tokens
from engine.types import EngineRequest, TokenLogprob
from tests.engine.scheduling.truth import allowed, bound_after, choose, score

VOCABULARY = 4  # tokens 0 .. 3: small, so that sequences meet and part inside pages all the time
EMPTY = 0  # a row nobody has written, or of a page that was freed since
NAN = -1  # a row that a failed step wrote


class Truth(NamedTuple):
    """What one sequence really is; `tokens` grows as the stream delivers."""

    namespace: Hashable
    request: EngineRequest
    seed: int
    tokens: list[int]


class FakeRunner:
    """Carries out plans on labelled rows; AssertionError where a plan is wrong."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.truth: dict[int, Truth] = {}
        self.rows_run = 0
        self.rows_scored = 0
        self._memory = [[EMPTY] * page_size for _ in range(num_pages)]
        self._labels: dict[object, int] = {}

    # -- what a harness does to the memory -------------------------------------------------------

    def forget(self, pages: Iterable[int]) -> None:
        """Free pages lose what they held, so that a stale but fitting row is never taken for a good one.

        What a failed step wrote stays until it is wiped.
        """
        for page in pages:
            self._memory[page] = [NAN if row == NAN else EMPTY for row in self._memory[page]]

    # -- steps -----------------------------------------------------------------------------------

    def run(self, plan: StepPlan, bad: frozenset[int] = frozenset()) -> StepResult:
        """Check and carry out a step. The rows of the sequences in `bad` become not-a-number."""
        self._wipe_and_copy(plan)
        self._check_rows(plan)
        self._write(plan, bad)
        self._check_attention(plan, bad)
        self.rows_run += plan.rows
        tokens, errors = list[int](), dict[int, str]()
        for j, (sample, id) in enumerate(self._samples(plan)):
            try:
                generated = sample.past.generated if sample.past is not None else []
                allow = allowed(sample.constraint, generated)
                tokens.append(choose(sample.seed, self.truth[id].tokens, allow))
            except ConstraintFailed as error:
                tokens.append(0)
                errors[j] = str(error)
        return StepResult(
            tokens=tuple(tokens),
            logprobs=(None,) * len(tokens),
            bad=bad,
            bounds=tuple(bound_after(s.params, s.bound, s.position) for s in plan.samples),
            errors=errors,
            scores=self._score(plan, bad),
        )

    def run_and_raise(self, plan: StepPlan, *, early: bool) -> None:
        """A step that raises: before it did anything (`early`), or after it wrote garbage."""
        if not early:
            self._wipe_and_copy(plan)
            self._check_rows(plan)
            self._write(plan, frozenset(range(len(plan.sequence_ids))))

    def _wipe_and_copy(self, plan: StepPlan) -> None:
        for page in plan.wipe:
            assert page > 0, "page 0 is wiped"
            self._memory[page] = [EMPTY] * self.page_size
        written = set(plan.write_slots.tolist())
        targets = [copy.target for copy in plan.copies]
        assert len(set(targets)) == len(targets), "a page is copied to twice"
        for copy in plan.copies:
            assert copy.source not in (0, copy.target), copy
            assert 0 < copy.rows < self.page_size, "only part of a page is copied"
            assert copy.source not in targets, "a copy reads what another copies"
            read = {copy.source * self.page_size + row for row in range(copy.rows)}
            assert not read & written, "a copied row is written in the same step"
            assert self._memory[copy.source][: copy.rows].count(EMPTY) == 0, "a copied row was never written"
            assert self._memory[copy.source][: copy.rows].count(NAN) == 0, "a copied row is not finite"
            self._memory[copy.target][: copy.rows] = self._memory[copy.source][: copy.rows]

    def _check_rows(self, plan: StepPlan) -> None:
        """Order of the rows, positions, tokens and samples."""
        bounds, positions = plan.row_indptr.tolist(), plan.attention.positions.tolist()
        assert len(set(plan.sequence_ids)) == len(plan.sequence_ids) == len(bounds) - 1
        assert bounds[0] == 0
        assert bounds[-1] == plan.rows == len(positions) == len(plan.write_slots)
        expected = []
        for index, id in enumerate(plan.sequence_ids):
            first, end = bounds[index], bounds[index + 1]
            truth = self.truth[id]
            assert first < end, "a sequence runs no row"
            start, stop = positions[first], positions[first] + end - first
            assert positions[first:end] == list(range(start, stop)), "positions are not in order"
            assert stop <= len(truth.tokens), "rows of tokens that do not exist"
            assert plan.token_ids[first:end].tolist() == truth.tokens[start:stop], "wrong tokens"
            if stop == len(truth.tokens) and truth.request.params.max_tokens > 0:
                expected.append((index, end - 1))
        assert list(zip(plan.sample_sequences, (s.row for s in plan.samples), strict=True)) == expected
        for sample, id in self._samples(plan):
            truth = self.truth[id]
            assert sample.params is truth.request.params
            assert sample.seed == truth.seed
            assert sample.prompt_index == truth.request.prompt_index
            assert sample.choice_index == truth.request.choice_index
            assert sample.position == len(truth.tokens) - len(truth.request.prompt)
            self._check_sample(sample, truth)

    def _check_sample(self, sample: SampleRow, truth: Truth) -> None:
        """What a choice depends on beside the row: the tokens so far, where asked for, and the bound."""
        request = truth.request
        told = request.constraint is not None or needs_tokens(request.params)
        assert sample.constraint is request.constraint
        generated = truth.tokens[len(request.prompt) :]
        assert (sample.past is not None) == told
        if sample.past is not None:
            assert sample.past.generated == generated
            assert sample.past.prompt_ids.tolist() == sorted(set(request.prompt))
            ids, counts = sample.past.counted()
            assert len(ids) == len(set(generated))
            assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == Counter(generated)
        bound = None
        for position in range(len(generated)):
            bound = bound_after(request.params, bound, position)
        assert sample.bound == bound, "mirostat starts anew"

    def _score(self, plan: StepPlan, bad: frozenset[int]) -> tuple[tuple[TokenLogprob, ...], ...]:
        """Log-probabilities that depend on the whole prefix of the very row that is named."""
        owners = [score.sequence for score in plan.scores]
        assert len(set(owners)) == len(owners), "a sequence is scored twice"
        found = []
        for rows in plan.scores:
            assert 0 <= rows.first < rows.first + len(rows.targets) <= plan.rows
            answers = [
                score(*self._prefix(plan, row), target, rows.top)
                for row, target in enumerate(rows.targets, rows.first)
            ]
            self.rows_scored += len(answers)
            found.append(() if rows.sequence in bad else tuple(answers))
        return tuple(found)

    def _prefix(self, plan: StepPlan, row: int) -> tuple[Sequence[int], int]:
        """The tokens of the sequence that row `row` belongs to, and how many the row has seen."""
        index = int((plan.row_indptr <= row).sum()) - 1
        return self.truth[plan.sequence_ids[index]].tokens, int(plan.attention.positions[row]) + 1

    def _samples(self, plan: StepPlan):
        return [(s, plan.sequence_ids[i]) for s, i in zip(plan.samples, plan.sample_sequences, strict=True)]

    def _write(self, plan: StepPlan, bad: frozenset[int]) -> None:
        slots, positions = plan.write_slots.tolist(), plan.attention.positions.tolist()
        assert len(set(slots)) == len(slots), "a slot is written twice"
        assert min(slots) >= self.page_size, "page 0 is written"
        for index, id in enumerate(plan.sequence_ids):
            first, end = plan.row_indptr[index : index + 2].tolist()
            labels = self._prefix_labels(id, positions[first] + end - first)
            for row in range(first, end):
                page, offset = divmod(slots[row], self.page_size)
                self._memory[page][offset] = NAN if index in bad else labels[positions[row]]

    def _check_attention(self, plan: StepPlan, bad: frozenset[int]) -> None:
        """Each row attends to tokens 0 .. position of its own prefix, each exactly once, in order."""
        attention, size = plan.attention, self.page_size
        assert attention.align % size == 0
        writer = {
            slot: index
            for index in range(len(plan.sequence_ids))
            for slot in plan.write_slots[plan.row_indptr[index] : plan.row_indptr[index + 1]].tolist()
        }
        *shared, last = attention.levels
        check_level(last, plan.rows, size)
        for level in shared:
            check_level(level, plan.rows, size)
            assert all(n in (0, size) for n in level.last_page_len.tolist()), "a shared page is not full"
        assert last.qo_indptr.tolist() == plan.row_indptr.tolist(), "the last level has a segment a sequence"
        for index, id in enumerate(plan.sequence_ids):
            first, end = plan.row_indptr[index : index + 2].tolist()
            start = int(attention.positions[first])
            spans = [[p for level in shared for p in level_pages(level, row)] for row in range(first, end)]
            assert all(span == spans[0] for span in spans), "rows of a sequence share different spans"
            kv_start = int(attention.kv_start[index])
            assert kv_start == len(spans[0]) * size, "private KV does not begin where shared spans end"
            assert kv_start % attention.align == 0, "a span is not cut at a tile"
            assert kv_start <= start, "a row stands before the end of its shared span"
            pages = spans[0] + level_pages(last, first)
            stop = start + end - first
            assert kv_start + tokens_in(last, index, size) == stop, "the tail does not end with the rows"
            assert 0 not in pages, "page 0 is attended to"
            if index in bad:
                continue
            labels = self._prefix_labels(id, stop)
            for token in range(stop):
                page, offset = pages[token // size], token % size
                assert self._memory[page][offset] == labels[token], (
                    f"sequence {id}: token {token} is read from page {page} row {offset}, which is another's"
                )
                assert writer.get(page * size + offset, index) == index, "a row is read that another writes"
            for page in pages:
                assert NAN not in self._memory[page], f"page {page} was not wiped"

    def _prefix_labels(self, id: int, length: int) -> list[int]:
        """The label of every prefix of a sequence: equal numbers mean equal namespace and tokens."""
        truth = self.truth[id]
        label, labels = self._label(("namespace", truth.namespace)), []
        for token in truth.tokens[:length]:
            label = self._label((label, token))
            labels.append(label)
        return labels

    def _label(self, key: object) -> int:
        return self._labels.setdefault(key, len(self._labels) + 1)


def check_level(level: CascadeLevel, rows: int, page_size: int) -> None:
    """The arrays of a level fit each other and cover all rows."""
    qo, kv = level.qo_indptr.tolist(), level.kv_indptr.tolist()
    assert all(a.dtype == "int32" for a in level)
    assert qo[0] == kv[0] == 0
    assert qo == sorted(qo)
    assert kv == sorted(kv)
    assert (qo[-1], kv[-1]) == (rows, len(level.kv_indices))
    assert len(qo) == len(kv) == len(level.last_page_len) + 1
    for segment, last in enumerate(level.last_page_len.tolist()):
        empty = kv[segment] == kv[segment + 1]
        assert last == 0 if empty else 0 < last <= page_size


def segment_of(level: CascadeLevel, row: int) -> int:
    """The segment of a level that holds a row."""
    qo: Sequence[int] = level.qo_indptr.tolist()
    return next(s for s in range(len(qo) - 1) if qo[s] <= row < qo[s + 1])


def level_pages(level: CascadeLevel, row: int) -> list[int]:
    """The pages that a row attends to in a level."""
    segment = segment_of(level, row)
    return level.kv_indices[level.kv_indptr[segment] : level.kv_indptr[segment + 1]].tolist()


def tokens_in(level: CascadeLevel, segment: int, page_size: int) -> int:
    """KV tokens of a segment."""
    pages = int(level.kv_indptr[segment + 1] - level.kv_indptr[segment])
    return (pages - 1) * page_size + int(level.last_page_len[segment]) if pages else 0
