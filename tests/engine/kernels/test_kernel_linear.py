"""Products of the kernel: right, and with the same bits for a row whatever is computed beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.kernels.library import Library, huge_zeros, load_library
from engine.models.linear import native_bf16
from engine.models.native import NativeLinear
from tests.kernels import needs_kernel

pytestmark = needs_kernel

DTYPES = [torch.float32, *([torch.bfloat16] if native_bf16() else [])]
ROWS = 300


@pytest.fixture(scope="module", params=["native", "x86-64-v3"])
def library(request: pytest.FixtureRequest) -> Library:
    """As this CPU likes it, and with AVX2 alone."""
    return load_library(request.param)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out", "width"), [(48, 64), (160, 576), (1000, 32), (1, 16), (97, 1536)])
@pytest.mark.usefixtures("threads")
def test_rows_are_right_and_do_not_depend_on_their_company(
    library: Library, dtype: torch.dtype, bias: bool, out: int, width: int
) -> None:
    if not library.supports(dtype):
        assert library.lanes == 8, "only the build without AVX-512 has no bf16 on a CPU that has it"
        return
    random = torch.Generator().manual_seed(out)
    weight = torch.randn(out, width, generator=random).to(dtype)
    added = torch.randn(out, generator=random) if bias else None
    x = torch.randn(ROWS, width, generator=random).to(dtype)
    linear = NativeLinear(library, weight, added)
    whole = linear.apply(x)
    exact = x.double() @ weight.double().T + (0.0 if added is None else added.double())
    torch.testing.assert_close(whole.double(), exact, atol=2e-5 * width**0.5, rtol=1e-5)
    for count in (*range(1, 35), 127, 128, 129, 257):
        rows = slice(7 * count % (ROWS - count + 1), None)
        # Five are more than some weights have panels: threads without any of their own help others.
        for number in (1, 2, 5) if count in (1, 9, 257) else (1, 2):
            torch.set_num_threads(number)
            assert torch.equal(linear.apply(x[rows][:count]), whole[rows][:count]), (count, number)


def test_a_number_that_is_not_finite_stays_in_its_row(library: Library) -> None:
    linear = NativeLinear(library, torch.randn(96, 64), None)
    x = torch.randn(20, 64)
    clean = linear.apply(x)
    x[7, 3], x[11, 60] = float("nan"), float("inf")
    sick = linear.apply(x)
    for row in range(20):
        assert torch.equal(sick[row], clean[row]) is (row not in (7, 11))
        assert bool(torch.isfinite(sick[row]).all()) is (row not in (7, 11))


def test_memory_is_zero_and_of_the_size_asked() -> None:
    for size in (0, 1, 4096, (2 << 20) + 1):
        memory = huge_zeros(size)
        assert memory.shape == (size,)
        assert not memory.any()
