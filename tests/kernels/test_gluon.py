"""The kernel for large tiles on a Hopper GPU: where there is such a GPU, it equals the definition."""

import pytest
import torch

from pando.kernels.reads import joined

from .test_attention import Case

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read of more than 16 packed queries in the largest tiles."""
    from pando.kernels import gpu
    from pando.kernels.gpu_tiles import LARGEST, Size

    monkeypatch.setattr(gpu, "sizes", lambda *_: (LARGEST, Size(16, crowd=4)))


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="the kernel is for a Hopper GPU")
@pytest.mark.usefixtures("large")
class TestOnHopper:
    @pytest.mark.parametrize(
        ("group", "size", "dtype"),
        [(1, 128, torch.bfloat16), (3, 64, torch.bfloat16), (4, 128, torch.bfloat16), (7, 128, torch.float16)],
    )
    def test_it_equals_the_definition_over_random_plans(self, group: int, size: int, dtype: torch.dtype) -> None:
        for seed in (0, 3, 4, 5):
            self.check(Case(seed, "rope", dtype, shape=(group, size, 2), tails=(0, 3, 63, 64, 129, 300), rows=5, page=64))

    def test_rows_over_one_run_that_is_cut_for_many_processors(self) -> None:
        case = Case(3, "none", torch.bfloat16, decoding=True, shape=(4, 128, 2), rows=1, page=64)
        self.rewrite(case, torch.full((200,), 1999), 0)
        for processors in (3, 132):
            self.check(case, processors)

    def test_a_row_that_stands_before_all_keys_of_a_run_sees_none_of_it(self) -> None:
        case = Case(3, "none", torch.bfloat16, decoding=True, shape=(4, 128), rows=1, page=64)
        self.rewrite(case, torch.arange(150) * 9, 0, 700)
        self.check(case, 16)

    def rewrite(self, case: Case, positions: torch.Tensor, *firsts: int) -> None:
        """Runs of keys that all rows read, up to the last row's position, where the rest of their pages is not written yet."""
        case._reads, case.free, case.positions = [], list(range(140)), positions
        end = int(positions.max()) + 1
        for first, stop in zip(firsts, (*firsts[1:], end), strict=True):
            everyone = range(len(positions))
            case.write(case.add(stop - first + 30 * (stop == end), first, everyone, [0] * len(everyone))[: stop - first])

    def check(self, case: Case, processors: int | None = None) -> None:
        from pando.kernels import gpu

        from .test_triton import check

        low = check(gpu, case, processors).lowering
        assert low._hopper is not None
        assert low._grids[0], "nothing was read in large tiles"

    def test_without_it_the_same_tiles_are_looked_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from pando.kernels import gpu
        from pando.kernels.reference import Geometry

        reads, positions = joined(64, [(range(8), 500, 0, range(100), [0] * 100)]), torch.arange(400, 500)
        q = torch.randn(100, 8, 128, dtype=torch.bfloat16, device="cuda")
        k, v = torch.randn(2, 512, 2, 128, dtype=torch.bfloat16, device="cuda")
        plan = gpu.Device.of(q.device), torch.bfloat16, reads, positions, Geometry(8, 2, 128, 128**-0.5)
        ours = gpu.TritonLowering(*plan).attend(q, q, k, v)
        monkeypatch.setattr(gpu, "found", lambda *_: None)
        torch.testing.assert_close(gpu.TritonLowering(*plan).attend(q, q, k, v), ours, atol=0.01, rtol=0.01)
