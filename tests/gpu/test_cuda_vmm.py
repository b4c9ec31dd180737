"""CUDA virtual memory behind regions: stable addresses, zeroed pages, pages that move under a captured graph."""

from __future__ import annotations

import gc

import pytest
import torch

pytest.importorskip("cuda.bindings")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from wisp_core.memory.cuda_vmm import CudaBacking, CudaRegion

DEVICE = "cuda"


@pytest.fixture(params=[False, True], ids=["unmapped", "filler"])
def backing(request: pytest.FixtureRequest) -> CudaBacking:
    return CudaBacking(DEVICE, has_filler=request.param)


def backed_bytes(*regions: CudaRegion) -> int:
    return sum(region.resident_bytes() for region in regions)


def test_pages_come_zeroed_and_go(backing: CudaBacking) -> None:
    page = backing.page_bytes
    region = backing.reserve("kv", 10 * page - 1)
    assert region.num_bytes == 10 * page
    assert region.resident_bytes() == 0
    tensor = region.tensor()
    region.back([(2 * page, 4 * page), (7 * page, 8 * page)])
    assert region.resident_bytes() == 3 * page
    assert not tensor[2 * page : 4 * page].any()
    tensor[2 * page : 4 * page] = -1
    region.release([(3 * page, 4 * page)])
    assert (tensor[2 * page : 3 * page] == -1).all()
    region.back([(0, 10 * page)])
    assert (tensor[2 * page : 3 * page] == -1).all(), "a backed page must keep its content"
    assert not tensor[3 * page :].any()
    assert not tensor[: 2 * page].any()
    assert region.resident_bytes() == 10 * page
    region.release([(0, 10 * page)])
    assert region.resident_bytes() == 0
    assert region.tensor().data_ptr() == tensor.data_ptr()


def test_pages_move_between_regions_without_new_memory(backing: CudaBacking) -> None:
    page = backing.page_bytes
    experts, kv = backing.reserve("experts", 64 * page), backing.reserve("kv", 64 * page)
    experts.back([(0, 32 * page)])
    experts.tensor()[: 32 * page] = 127
    physical_bytes = backing.physical_bytes()
    for _ in range(5):
        experts.release([(16 * page, 32 * page)])
        kv.back([(8 * page, 24 * page)])
        assert backing.physical_bytes() == physical_bytes
        assert backed_bytes(experts, kv) == 32 * page
        assert not kv.tensor()[8 * page : 24 * page].any(), "weights of the giver must not show"
        kv.tensor()[8 * page : 24 * page] = 1
        kv.release([(8 * page, 24 * page)])
        experts.back([(16 * page, 32 * page)])
        assert (experts.tensor()[: 16 * page] == 127).all()
        assert not experts.tensor()[16 * page : 32 * page].any()


def test_a_captured_graph_stays_valid_while_pages_move(backing: CudaBacking) -> None:
    page = backing.page_bytes
    cells = page // 4
    regions = [backing.reserve(name, 16 * page) for name in ("experts", "kv")]
    experts, kv = (region.tensor().view(torch.int32).view(16, cells) for region in regions)
    regions[0].back([(0, 8 * page)])
    regions[1].back([(0, 8 * page)])
    rows = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    out = torch.zeros(4, cells, dtype=torch.int32, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    torch.add(experts.index_select(0, rows), kv.index_select(0, rows), out=out)
    with torch.cuda.graph(graph):
        torch.add(experts.index_select(0, rows), kv.index_select(0, rows), out=out)
    for split in (8, 4, 12, 6, 16, 4):
        for region, pages in zip(regions, (split, 20 - split), strict=True):
            region.release([(min(pages, 16) * page, 16 * page)])
        for region, pages in zip(regions, (split, 20 - split), strict=True):
            region.back([(0, min(pages, 16) * page)])
        both = min(split, 20 - split)
        values = torch.randint(0, 1 << 20, (2, both, cells), dtype=torch.int32, device=DEVICE)
        experts[:both], kv[:both] = values
        rows.copy_(torch.randint(0, both, (4,)))
        graph.replay()
        assert torch.equal(out, (values[0] + values[1])[rows])


def test_rows_that_straddle_pages_are_whole_once_backed(backing: CudaBacking) -> None:
    """3 MiB rows on larger pages: a slot is no page."""
    row_bytes, num_rows, cap = 3 << 20, 16, 5
    region = backing.reserve("w2", num_rows * row_bytes)
    slots = region.tensor()[: num_rows * row_bytes].view(torch.bfloat16).view(num_rows, -1)
    region.back([(0, -(-cap * row_bytes // region.page_bytes) * region.page_bytes)])
    values = torch.randn(cap, row_bytes // 2, device=DEVICE, dtype=torch.bfloat16)
    slots[:cap] = values
    assert torch.equal(slots[:cap], values)


def test_no_memory_left_changes_nothing(backing: CudaBacking) -> None:
    page = backing.page_bytes
    region = backing.reserve("kv", 256 * page)
    region.back([(0, 4 * page)])
    region.tensor()[: 4 * page] = 5
    physical_bytes = backing.physical_bytes()
    torch.cuda.empty_cache()
    ballast = torch.empty(torch.cuda.mem_get_info()[0] - 128 * page, dtype=torch.int8, device=DEVICE)
    with pytest.raises(MemoryError, match="OUT_OF_MEMORY"):
        region.back([(0, 256 * page)])
    del ballast
    torch.cuda.empty_cache()
    assert region.resident_bytes() == 4 * page
    assert backing.physical_bytes() == physical_bytes
    assert (region.tensor()[: 4 * page] == 5).all()
    region.back([(0, 256 * page)])
    assert region.resident_bytes() == 256 * page


def test_pages_outlive_their_region_and_trim_returns_them(backing: CudaBacking) -> None:
    page = backing.page_bytes
    empty_bytes = backing.physical_bytes()
    region = backing.reserve("kv", 300 * page)
    region.back([(0, 300 * page)])
    view = region.tensor()[: page // 2]
    del region
    gc.collect()
    view.fill_(3)  # torch keeps the range alive
    torch.cuda.synchronize()
    del view
    gc.collect()
    assert backing.physical_bytes() >= 300 * page
    before_bytes = torch.cuda.mem_get_info()[0]
    backing.trim()
    assert backing.physical_bytes() <= empty_bytes
    assert torch.cuda.mem_get_info()[0] - before_bytes >= 300 * page


@pytest.mark.parametrize("stray", [(1, 0), (0, 1)])
def test_ranges_off_the_pages_are_refused(backing: CudaBacking, stray: tuple[int, int]) -> None:
    page = backing.page_bytes
    region = backing.reserve("kv", 4 * page)
    for bad in [(stray[0], page + stray[1]), (0, 5 * page), (-page, page), (2 * page, page)]:
        with pytest.raises(ValueError, match="not page-aligned inside"):
            region.back([bad])
        with pytest.raises(ValueError, match="not page-aligned inside"):
            region.release([bad])
    assert region.resident_bytes() == 0
    with pytest.raises(ValueError, match="num_bytes must be positive"):
        backing.reserve("nothing", 0)


def test_stray_accesses_meet_the_filler() -> None:
    backing = CudaBacking(DEVICE, has_filler=True)
    page = backing.page_bytes
    region = backing.reserve("kv", 8 * page)
    region.back([(2 * page, 4 * page)])
    region.tensor()[:] = 9
    torch.cuda.synchronize()
    assert (region.tensor()[2 * page : 4 * page] == 9).all()
    region.back([(0, 2 * page)])
    assert not region.tensor()[: 2 * page].any()
