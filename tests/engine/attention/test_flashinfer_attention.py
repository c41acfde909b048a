"""FlashInferAttention through FlashInfer's real wrappers on the CPU, against the oracle.

What runs here is everything but the compiled kernels; the stand-ins for those assert what they take on trust.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.attention.base import KvShape
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.flashinfer_graph import GraphKey, GraphLimits
from engine.attention.flashinfer_library import load_flashinfer, release, require_cuda
from engine.attention.reference import ReferenceAttention
from engine.errors import ConfigError
from engine.plan import RowCopy, StepPlan
from tests.engine.attention.flashinfer_shim import EMPTY_LSE_LOG2, Launches, cpu_kernels
from tests.engine.attention.flashinfer_trees import PAGE, random_members
from tests.engine.attention.plans import Member, step_plan

pytestmark = pytest.mark.usefixtures("flashinfer_installed")

POOL = 150
TOLERANCE = 2e-2
SHARED, OTHER = (1, 2), (3,)


@pytest.fixture(params=EMPTY_LSE_LOG2, ids=["empty-inf", "empty-5e4"])
def launches(request: pytest.FixtureRequest, flashinfer_installed: Path) -> Iterator[Launches]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # hundreds of tiny operations: handing each to a second thread costs more
    with cpu_kernels(request.param) as log:
        yield log
    torch.set_num_threads(threads)


class Pair:
    """A FlashInfer executor and the oracle over the same random KV, fed the same rows."""

    def __init__(self, heads: int = 4, kv_heads: int = 2, head_dim: int = 64, **options: object) -> None:
        self.shape = KvShape(2, POOL, PAGE, heads, kv_heads, head_dim)
        self.random = torch.Generator().manual_seed(3)
        self.own = FlashInferAttention(self.shape, torch.bfloat16, device="cpu", tile=PAGE, **options)
        self.oracle = ReferenceAttention(self.shape, align=PAGE)
        slots = torch.arange(PAGE, POOL * PAGE)
        for layer in range(2):
            kv = self.draw(len(slots), 2, kv_heads, head_dim)
            self.own.write_rows(layer, slots, kv)
            self.oracle.write_rows(layer, slots, kv)

    def draw(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.random).bfloat16()

    def rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v as the decoder gives them: views into one tensor."""
        heads, kv = self.shape.num_heads, self.shape.num_kv_heads
        fused = self.draw(count, heads + 2 * kv, self.shape.head_dim)
        q, k, v = torch.split(fused, [heads, kv, kv], 1)
        return q, k, v

    def check(self, members: list[Member]) -> None:
        """Both give the same rows and leave the same KV."""
        self.check_plan(step_plan(members, PAGE, PAGE))

    def check_plan(self, plan: StepPlan) -> None:
        self.own.begin(plan)
        key = self.own.graph_key
        qkv = self.rows(key.rows if key else plan.rows + 2)
        self.oracle.begin(plan)
        for layer in range(2):
            given = self.own.attend(layer, *qkv)
            expected = self.oracle.attend(layer, *qkv)
            torch.testing.assert_close(given, expected, rtol=TOLERANCE, atol=TOLERANCE)
            slots = torch.arange(POOL * PAGE)
            kept = self.oracle.read_rows(layer, slots).bfloat16()
            assert torch.equal(self.own.read_rows(layer, slots), kept)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 2, 64), (8, 1, 128), (3, 3, 64), (14, 2, 64)]
)
@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["fast", "deterministic"])
def test_random_trees_are_attended_as_the_oracle_does(
    launches: Launches, heads: int, kv_heads: int, head_dim: int, options: dict[str, bool]
) -> None:
    """O020, O022: forests and trees, GQA, page tails, prefill beside decode, empty segments."""
    pair = Pair(heads, kv_heads, head_dim, **options)
    rng = random.Random(heads)
    for _ in range(3):
        pair.check(random_members(rng, rows=7, pages=POOL))
    assert launches.of("merge")


def test_decode_steps_in_a_graphs_shapes_give_the_same_rows(launches: Launches) -> None:
    pair = Pair(graphs=GraphLimits(rows=16, indices=400))
    rng, keys = random.Random(8), set()
    for _ in range(14):
        pair.check(random_members(rng, rows=1, pages=POOL)[:16])
        keys.add(pair.own.graph_key)
    assert len(keys - {None}) >= 4
    assert any(plan["graph"] for plan in launches.of("plan"))


def test_a_graphs_step_reads_addresses_that_stay(launches: Launches) -> None:
    """What a captured graph replays must find the new step where it found the first one."""
    pair = Pair(graphs=GraphLimits(rows=8, indices=100))
    first = [Member((SHARED,), (10,), 8, 1), Member((SHARED,), (11,), 9, 1), Member((), (12,), 2, 1)]
    second = [Member((OTHER,), (20,), 5, 1), Member((OTHER,), (21,), 4, 1)]
    pair.check([*second, Member((), (23,), 1, 1)])
    assert pair.own.graph_key == GraphKey(4, 2)
    levels = pair.own._current
    assert levels is not None
    kept = addresses(levels)
    pair.check(first)
    assert pair.own._current is levels
    assert addresses(levels) == kept


def addresses(levels: object) -> list[int]:
    writes = levels._writes  # type: ignore[attr-defined]
    buffers = [
        tensor
        for wrapper in levels._wrappers  # type: ignore[attr-defined]
        for tensor in (
            wrapper._qo_indptr_buf,
            wrapper._paged_kv_indptr_buf,
            wrapper._paged_kv_indices_buf,
            wrapper._paged_kv_last_page_len_buf,
            wrapper._int_workspace_buffer,
        )
    ]
    return [tensor.data_ptr() for tensor in (*writes, *buffers)]


def test_a_sequence_shorter_than_a_page_and_one_that_fills_it_stand_together(launches: Launches) -> None:
    """O022: lengths of 1, P-1, P and P+1 tokens beside one of 10 P."""
    lengths, pages, members = (1, PAGE - 1, PAGE, PAGE + 1, 10 * PAGE), iter(range(1, POOL)), []
    for length in lengths:
        own = tuple(next(pages) for _ in range(-(-length // PAGE)))
        members.append(Member((), own, length - 1, 1))
    Pair().check(members)
    (private, *_) = launches.of("prefill")
    assert private["last"] == [1, PAGE - 1, PAGE, 1, PAGE]


def test_only_the_private_level_is_causal_and_comes_first(launches: Launches) -> None:
    Pair().check([Member((SHARED, OTHER), (5, 6), 12, 5), Member((SHARED, OTHER), (7,), 14, 1)])
    first_layer = launches.of("prefill")[:3]
    assert [(run["causal"], run["lse"]) for run in first_layer] == [
        (True, True),
        (False, True),
        (False, True),
    ]
    assert [run["indices"] for run in first_layer] == [[5, 6, 7], [1, 2], [3]]
    assert [kind for kind, _ in launches.seen if kind in ("append", "prefill", "merge")][:6] == [
        "append",
        "prefill",
        "prefill",
        "merge",
        "prefill",
        "merge",
    ]


def test_a_flat_step_is_one_launch_without_states(launches: Launches) -> None:
    Pair().check([Member((), (5, 6), 4, 2), Member((), (7,), 0, 3)])
    assert [run["lse"] for run in launches.of("prefill")] == [False, False]
    assert launches.of("merge") == []


def test_a_level_is_planned_once_a_step_for_all_layers(launches: Launches) -> None:
    Pair().check([Member((SHARED,), (5,), 8, 1), Member((SHARED,), (6,), 8, 1)])
    assert len(launches.of("plan")) == 2
    assert len(launches.of("prefill")) == 4


def test_reads_are_counted_by_level(launches: Launches) -> None:
    pair = Pair()
    pair.check([Member((SHARED,), (5,), 9, 1), Member((SHARED,), (6,), 8, 1), Member((), (7,), 2, 1)])
    assert pair.own.kv_tokens_read == (8, 2 + 1 + 3)


def test_two_empty_states_merge_to_an_empty_one(launches: Launches) -> None:
    """O021: no NaN, whichever number stands for an empty state."""
    library = load_flashinfer()
    v, other = torch.zeros(2, 4, 64).bfloat16(), torch.zeros(2, 4, 64).bfloat16()
    lse_log2 = torch.full((2, 4), launches.empty_lse_log2)
    library.merge_state_in_place(v, lse_log2, other, lse_log2.clone())
    assert torch.equal(v, other)
    assert bool((lse_log2 <= -4.9e4).all())


def test_a_padding_row_is_zero_at_any_number_of_levels(launches: Launches) -> None:
    """O021: in a graph's shapes a padding row is empty at every level."""
    pair = Pair(graphs=GraphLimits(rows=4, indices=100))
    members = [Member((SHARED, OTHER), (5 + i,), 12, 1) for i in range(3)]
    pair.own.begin(step_plan(members, PAGE, PAGE))
    assert pair.own.graph_key == GraphKey(4, 3)
    assert not pair.own.attend(0, *pair.rows(4))[3].any()
    assert not pair.own.read_rows(0, torch.arange(PAGE)).any(), "the zero page stays zero"


def test_natural_log_sum_exps_would_be_noticed(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """The merge weighs states by powers of two: fed natural logarithms, rows leave the tolerance."""
    pair = Pair()
    library = pair.own._kernels.library
    merge = library.merge_state_in_place

    def in_wrong_unit(v: torch.Tensor, s: torch.Tensor, other: torch.Tensor, s_other: torch.Tensor) -> None:
        merge(v, s * math.log(2), other, s_other * math.log(2))

    monkeypatch.setattr(library, "merge_state_in_place", in_wrong_unit)
    with pytest.raises(AssertionError, match="not close"):
        pair.check([Member((SHARED, OTHER), (5,), 13, 1), Member((SHARED, OTHER), (6,), 14, 1)])


def test_deterministic_runs_every_row_alone_with_fixed_cuts_and_no_graph(launches: Launches) -> None:
    pair = Pair(deterministic=True, graphs=GraphLimits(rows=8, indices=100))
    member = Member((), (5, 6, 7), 2, 8)
    pair.check([member, Member((), (8,), 3, 1)])
    assert pair.own.graph_key is None
    (plan, *_) = launches.of("plan")
    assert plan["rows"] == list(range(10))
    assert plan["fixed_split"] == 4096 // PAGE
    together = {(pages, last) for pages, last in row_tables(launches.of("prefill")[0])}
    for chunk in member.split([3, 4, 1]):
        launches.seen.clear()
        pair.check([chunk])
        assert set(row_tables(launches.of("prefill")[0])) <= together


def row_tables(run: dict[str, list[int]]) -> list[tuple[tuple[int, ...], int]]:
    return [
        (tuple(run["indices"][a:b]), last)
        for a, b, last in zip(run["pages"], run["pages"][1:], run["last"], strict=False)
    ]


def test_the_workspace_of_fixed_cuts_grows_when_a_step_needs_it(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.attention.flashinfer_levels._LARGEST_TILE", 1)
    pair = Pair(deterministic=True)
    needed = 20 * 16 * 4 * 65 * 4
    assert pair.own._eager._workspace.numel() < needed
    pair.check([Member((), tuple(range(1, 40)), 130, 20)])
    assert pair.own._eager._workspace.numel() >= needed


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        (KvShape(1, 8, 4, 65, 65, 128), torch.bfloat16, "merges at most 64 heads of head_dim 128"),
        (KvShape(1, 8, 4, 129, 129, 64), torch.bfloat16, "merges at most 128 heads of head_dim 64"),
        (KvShape(1, 8, 4, 34, 2, 256), torch.bfloat16, "merges at most 32 heads of head_dim 256"),
        (KvShape(1, 8, 4, 4, 2, 80), torch.bfloat16, "not 80"),
        (KvShape(1, 8, 4, 4, 3, 64), torch.bfloat16, "no multiple of 3 KV heads"),
        (KvShape(1, 8, 4, 4, 2, 64), torch.float32, "not torch.float32"),
    ],
)
def test_a_shape_that_no_kernel_can_run_is_refused_at_the_start(
    shape: KvShape, dtype: torch.dtype, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        FlashInferAttention(shape, dtype, device="cpu")


def test_as_many_heads_as_the_merge_takes_are_served(launches: Launches) -> None:
    Pair(heads=128, kv_heads=2).check([Member((SHARED,), (5,), 8, 1), Member((SHARED,), (6,), 8, 1)])


@pytest.mark.parametrize("which", [0, 1, 2])
def test_rows_of_another_type_or_shape_are_refused(launches: Launches, which: int) -> None:
    """The append kernel would read them as the cache's type."""
    pair = Pair()
    pair.own.begin(step_plan([Member((), (5,), 0, 2)], PAGE, PAGE))
    for wrong in (lambda x: x.float(), lambda x: x[:, :1, :32]):
        qkv = list(pair.rows(2))
        qkv[which] = wrong(qkv[which])
        with pytest.raises(ValueError, match=f"{'qkv'[which]} is"):
            pair.own.attend(0, *qkv)


def test_fewer_rows_than_planned_are_refused(launches: Launches) -> None:
    pair = Pair()
    pair.own.begin(step_plan([Member((), (5,), 0, 2)], PAGE, PAGE))
    with pytest.raises(ValueError, match="1 rows were given"):
        pair.own.attend(0, *pair.rows(1))


def test_a_step_in_a_graphs_shapes_runs_on_its_own_rows_alone_too(launches: Launches) -> None:
    """As when attention is timed without a decoder, which would pad the rows."""
    pair = Pair(graphs=GraphLimits(rows=4, indices=100))
    plan = step_plan([Member((SHARED,), (5 + i,), 8, 1) for i in range(3)], PAGE, PAGE)
    pair.own.begin(plan)
    pair.oracle.begin(plan)
    assert pair.own.graph_key == GraphKey(4, 2)
    qkv = pair.rows(3)
    given, expected = pair.own.attend(0, *qkv), pair.oracle.attend(0, *qkv)
    torch.testing.assert_close(given, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_an_impossible_plan_leaves_nothing_to_attend_with(launches: Launches) -> None:
    pair = Pair()
    plan = step_plan([Member((), (5,), 0, 2)], PAGE, PAGE)
    pair.own.begin(plan)
    with pytest.raises(ValueError, match="impossible plan"):
        pair.own.begin(plan._replace(write_slots=plan.write_slots + 1))
    with pytest.raises(RuntimeError, match="begin"):
        pair.own.attend(0, *pair.rows(2))


def test_copies_and_wipes_touch_every_layer_and_no_other_page(launches: Launches) -> None:
    pair = Pair()
    for backend in (pair.own, pair.oracle):
        backend.copy_rows([RowCopy(5, 6, 3), RowCopy(6, 7, 2)])
        backend.wipe([9, 5])
    slots = torch.arange(POOL * PAGE)
    for layer in range(2):
        assert torch.equal(pair.own.read_rows(layer, slots).float(), pair.oracle.read_rows(layer, slots))
    for wrong in ([0], [POOL]):
        with pytest.raises(ValueError, match="not one of"):
            pair.own.wipe(wrong)
        with pytest.raises(ValueError, match="not one of"):
            pair.own.copy_rows([RowCopy(wrong[0], 5, 1)])
    with pytest.raises(ValueError, match="impossible copy"):
        pair.own.copy_rows([RowCopy(5, 6, PAGE + 1)])


def fresh(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    root = Path(__file__).resolve().parents[3]
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_engine_and_its_cpu_executors_do_not_load_flashinfer() -> None:
    code = (
        "import sys, engine.runner, engine.attention.flashinfer, engine.models.cuda, engine.engine\n"
        "import torch\n"
        "from engine.attention.base import KvShape\n"
        "from engine.attention.cpu import CpuAttention\n"
        "CpuAttention(KvShape(1, 8, 16, 2, 1, 64), torch.float32)\n"
        "assert not {'flashinfer', 'tvm_ffi'} & set(sys.modules)\n"
    )
    done = fresh(code)
    assert done.returncode == 0, done.stderr


def test_without_the_package_the_start_is_refused_in_words() -> None:
    code = (
        "import sys\n"
        "sys.modules['flashinfer'] = None\n"
        "from engine.attention.flashinfer_library import load_flashinfer\n"
        "from engine.errors import ConfigError\n"
        "try: load_flashinfer()\n"
        "except ConfigError as error: print(error)\n"
    )
    done = fresh(code)
    assert done.stdout.startswith("HEADWATER_EXECUTOR=flashinfer needs FlashInfer, which does not load here")
    assert "install headwater[cuda]" in done.stdout


def test_an_old_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library = load_flashinfer()
    monkeypatch.setattr(library, "__version__", "0.6.6")
    with pytest.raises(ConfigError, match=r"0\.6\.18 or newer, and 0\.6\.6 is installed"):
        load_flashinfer()
    assert release("0.6.18.post1") == (0, 6, 18)


def test_without_a_gpu_the_start_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU"):
        require_cuda()
