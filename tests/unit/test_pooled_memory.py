"""Moving pages that fails: a refusal changes nothing; anything else leaves it unknown what is backed, and ends it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from wisp_core.engine.pooled_memory import PooledMemory
from wisp_core.errors import IntegrityError
from wisp_core.memory.balloon import KvGeometry
from wisp_core.memory.memfd import MemfdRegion

PAGE = 4096
GEOMETRY = KvGeometry(page_bytes=PAGE, num_blocks=16, group_blocks=1, block_bytes=PAGE, runs=((0, PAGE),))


class Experts:
    """A slot is a page."""

    def __init__(self) -> None:
        self.cap = 2
        self.failure: Exception | None = None

    def experts_bytes_by_cap(self) -> tuple[int, ...]:
        return tuple(cap * PAGE for cap in range(9))

    def set_cap(self, cap: int) -> None:
        if self.failure is not None:
            raise self.failure
        self.cap = cap

    def resident_bytes(self) -> int:
        return self.cap * PAGE

    def check_integrity(self) -> None:
        return


def pool() -> tuple[PooledMemory, Experts, MemfdRegion]:
    experts, region = Experts(), MemfdRegion("kv", 16 * PAGE)
    return (
        PooledMemory(budget_bytes=20 * PAGE, experts=experts, kv_region=region, geometry=GEOMETRY),
        experts,
        region,
    )


MOVES: dict[str, Callable[[PooledMemory], None]] = {
    "map": lambda memory: memory.map_groups([3]),
    "unmap": lambda memory: memory.unmap_groups([1]),
    "set_cap": lambda memory: memory.set_cap(4),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("failure", [RuntimeError("CUDA driver: 1"), OSError("no permission")])
def test_after_a_failure_half_way_nothing_works_any_more(
    monkeypatch: pytest.MonkeyPatch, move: str, failure: Exception
) -> None:
    memory, experts, region = pool()
    memory.map_groups([1])

    def fail(ranges: object) -> None:
        raise failure

    experts.failure = failure
    monkeypatch.setattr(region, "back", fail)
    monkeypatch.setattr(region, "release", fail)
    with pytest.raises(type(failure)):
        MOVES[move](memory)
    monkeypatch.undo()
    experts.failure = None
    for use in (memory.check_usable, memory.check_integrity, lambda: memory.report()):
        with pytest.raises(IntegrityError, match="restarted"):
            use()
    for later in MOVES.values():
        with pytest.raises(IntegrityError, match="restarted"):
            later(memory)


def test_a_refusal_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, experts, region = pool()
    before = memory.report()

    def refuse(ranges: object) -> None:
        raise MemoryError("no pages")

    experts.failure = MemoryError("no pages")
    monkeypatch.setattr(region, "back", refuse)
    for move in ("map", "set_cap"):
        with pytest.raises(MemoryError):
            MOVES[move](memory)
    assert memory.report() == before
    memory.check_integrity()
