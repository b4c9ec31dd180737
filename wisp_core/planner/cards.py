"""Cards that a plan can be made for without having one: sizes from their makers' data sheets.

Measured: the H200, by the benchmarks under ``loadtests/results``. For the others the link is taken at 81 % of its
nominal rate, which is what page-locked copies reach on PCIe 4.0 and 3.0 x16 hosts as a rule, with 15 % of doubt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from wisp_core.errors import ConfigurationError

_GB = 10**9
_PCIE_X16 = {3: 15.75e9, 4: 31.5e9, 5: 63.0e9, 6: 126.0e9}
_LINK_SHARE = 0.81


@dataclass(frozen=True, kw_only=True)
class Card:
    """One kind of device."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    """Of the device's own memory, by its data sheet."""
    flops: float
    """Dense 16-bit tensor operations per second, by its data sheet."""
    link_bytes_per_s: float
    """Page-locked copies from host memory."""
    link: str
    source: str
    page_bytes: int = 4 << 20
    link_error: float = 0.15
    """Doubt in the link's speed, as a fraction."""

    def with_link(self, bytes_per_s: float) -> Card:
        """The same card behind a link that was measured."""
        return replace(self, link_bytes_per_s=bytes_per_s, link="as given", link_error=0.03)

    def in_machine(self, *, memory_bytes: int, pcie: int, lanes: int) -> Card:
        """The same card as a machine's driver describes it: its memory, and the link that both ends can do."""
        if pcie not in _PCIE_X16 or lanes <= 0:
            return replace(self, memory_bytes=memory_bytes)
        link = f"PCIe {pcie}.0 x{lanes}"
        if link == self.link:
            return replace(self, memory_bytes=memory_bytes)
        speed = _PCIE_X16[pcie] * lanes / 16 * _LINK_SHARE
        return replace(self, memory_bytes=memory_bytes, link_bytes_per_s=speed, link=link, link_error=0.15)


def _card(name: str, memory_gb: float, memory_gb_per_s: float, tflops: float, pcie: int, lanes: int = 16) -> Card:
    return Card(
        name=name,
        memory_bytes=int(memory_gb * _GB),
        memory_bytes_per_s=memory_gb_per_s * 1e9,
        flops=tflops * 1e12,
        link_bytes_per_s=_PCIE_X16[pcie] * lanes / 16 * _LINK_SHARE,
        link=f"PCIe {pcie}.0 x{lanes}",
        source="NVIDIA's data sheet; link by its nominal rate",
    )


H200 = Card(
    name="h200",
    memory_bytes=150_109_880_320,
    memory_bytes_per_s=4800e9,
    flops=989e12,
    link_bytes_per_s=55.0e9,
    link="PCIe 5.0 x16",
    source="loadtests/results/decode-h200.json; memory and arithmetic by NVIDIA's data sheet",
    link_error=0.02,
)

CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        H200,
        _card("t4", 15.8, 320, 65, 3),
        _card("a10", 24.1, 600, 125, 4),
        _card("l4", 24.1, 300, 121, 4),
        _card("l40s", 48.3, 864, 362, 4),
        _card("rtx-3090", 25.4, 936, 71, 4),
        _card("rtx-4060-ti-16gb", 17.2, 288, 88, 4, lanes=8),
        _card("rtx-4090", 25.4, 1008, 165, 4),
        _card("rtx-5090", 34.2, 1792, 210, 5),
        _card("a100-40gb", 42.5, 1555, 312, 4),
        _card("h100", 85.5, 3350, 989, 5),
    )
}


def find_card(name: str) -> Card:
    """The card ``name``. Raises ConfigurationError with the names."""
    try:
        return CARDS[name.lower()]
    except KeyError:
        raise ConfigurationError(f"--card {name}: known are {', '.join(CARDS)}") from None


def card_named(product: str) -> Card | None:
    """The profile of a card by its product name, as a driver tells it; None when there is none."""
    words = set(product.lower().replace("-", " ").split())
    fitting = [card for card in CARDS.values() if words.issuperset(card.name.split("-"))]
    return max(fitting, key=lambda card: len(card.name), default=None)


def card_like(product: str, memory_bytes: int) -> Card:
    """`card_named`, or the profile whose memory is nearest: what to reckon with where a guess is better than none."""
    named = card_named(product)
    return named or min(CARDS.values(), key=lambda card: abs(card.memory_bytes - memory_bytes))
