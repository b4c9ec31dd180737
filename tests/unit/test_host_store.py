"""Which parameters are paged, and that the store is the only full copy."""

from __future__ import annotations

import pytest
import torch

from wisp_core.errors import UnsupportedModelError
from wisp_core.pager.host_store import HostStore, paged_parameters


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)


def test_takes_every_expert_parameter_by_prefix_and_nothing_else() -> None:
    given = {
        "w13_weight": parameter(4, 6, 2),
        "w13_bias": parameter(4, 6),
        "w2_weight": parameter(4, 2, 3),
        "e_score_correction_bias": parameter(4),
        "gate": parameter(4, 2),
    }
    assert list(paged_parameters("layer", given.items(), 4)) == ["w13_weight", "w13_bias", "w2_weight"]


@pytest.mark.parametrize(
    "given",
    [
        {"w13_weight": parameter(3, 6, 2)},
        {"w13_scale": parameter()},
        {"w2_weight": torch.nn.Parameter(torch.zeros(4, 2, 3).transpose(1, 2), requires_grad=False)},
        {"gate": parameter(4, 2)},
    ],
)
def test_refuses_what_is_not_one_run_of_bytes_per_expert(given: dict[str, torch.nn.Parameter]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"layer.*Remove 'wisp'"):
        paged_parameters("layer", given.items(), 4)


def test_keeps_the_given_storage() -> None:
    weight = torch.arange(24, dtype=torch.bfloat16).reshape(4, 3, 2)
    store = HostStore({"w13_weight": weight, "w2_bias": torch.zeros(4, 5)})
    assert store.expert_bytes == 3 * 2 * 2 + 5 * 4
    assert [row.data_ptr() for row in store.rows("w13_weight")] == [weight[i].data_ptr() for i in range(4)]
