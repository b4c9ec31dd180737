"""Mappings that cover page indices, against a plain list of who covers what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wisp_core.memory.mappings import Mappings

NUM_PAGES = 40


def test_a_long_run_takes_several_mappings() -> None:
    mappings = Mappings(longest=16)
    assert mappings.add(0, 40) == [(0, 16), (16, 32), (32, 40)]
    assert mappings.remove(20, 21) == [(16, 32)]
    assert mappings.add(16, 20) == [(16, 20)]
    assert mappings.add(21, 32) == [(21, 29), (29, 31), (31, 32)]
    assert mappings.remove(18, 20) == [(16, 20)]
    assert mappings.remove(22, 31) == [(21, 29), (29, 31)]
    assert mappings.remove(31, 40) == [(31, 32), (32, 40)]
    assert mappings.remove(0, 1) == [(0, 16)]


@given(
    st.sampled_from([1, 2, 8, 16]),
    st.lists(st.tuples(st.integers(0, NUM_PAGES - 1), st.integers(1, NUM_PAGES)), max_size=30),
)
def test_what_is_taken_out_is_whole_mappings_around_it(longest: int, cuts: list[tuple[int, int]]) -> None:
    mappings = Mappings(longest)
    covering = {page: piece for piece in mappings.add(0, NUM_PAGES) for page in range(*piece)}
    for start, length in cuts:
        stop = min(start + length, NUM_PAGES)
        if not all(page in covering for page in range(start, stop)):
            continue
        dropped = mappings.remove(start, stop)
        assert dropped == sorted({covering[page] for page in range(start, stop)})
        outer = dropped[0][0], dropped[-1][1]
        for page in range(*outer):
            del covering[page]
        for rest in ((outer[0], start), (stop, outer[1])):
            for piece in mappings.add(*rest):
                assert piece[1] - piece[0] in {1, 2, 4, 8, 16}
                assert piece[1] - piece[0] <= longest
                covering |= dict.fromkeys(range(*piece), piece)
        assert list(mappings) == sorted(set(covering.values()))
