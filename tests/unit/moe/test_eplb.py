"""Expert placement against the oracle, and what must hold for any loads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_oracle import load_cases

from megatron_moe.moe.placement import device_loads, pack_equally, place_experts


@load_cases("eplb")
def test_vectors(case):
    p, expected = case["params"], case["expected"]
    loads_LE = torch.tensor(case["inputs"]["weights"], dtype=torch.float64)
    placement = place_experts(loads_LE, p["n_physical"], p["n_groups"], p["n_nodes"], p["n_gpus"])
    assert placement.copies_LE.tolist() == expected["copies"]
    for ours_EX, theirs_EX in zip(placement.physical_ids_LEX.tolist(), expected["logical_to_phys"], strict=True):
        assert [set(row) - {-1} for row in ours_EX] == [set(row) - {-1} for row in theirs_EX]
    if case["name"] == "readme_hierarchical":
        assert placement.logical_ids_LP.tolist() == expected["phys_to_logical"]
    loads_LX = device_loads(loads_LE, placement, p["n_gpus"])
    torch.testing.assert_close(loads_LX, torch.tensor(expected["gpu_load"], dtype=torch.float64))


@given(st.lists(st.floats(0, 100), min_size=8, max_size=8), st.sampled_from([8, 12, 16]))
def test_every_expert_has_a_place_and_load_is_conserved(loads, num_physical):
    loads_LE = torch.tensor([loads], dtype=torch.float64)
    placement = place_experts(loads_LE, num_physical, num_groups=4, num_nodes=2, num_devices=4)
    assert set(placement.logical_ids_LP[0].tolist()) == set(range(8))
    torch.testing.assert_close(device_loads(loads_LE, placement, 4).sum(), loads_LE.sum())
    # Group-limited routing: all copies of a group's experts are on one node.
    nodes_P = torch.arange(num_physical) // (num_physical // 2)
    for group in range(4):
        assert len(set(nodes_P[placement.logical_ids_LP[0] // 2 == group].tolist())) == 1


@given(st.lists(st.floats(0, 100), min_size=12, max_size=12))
def test_packs_have_equal_numbers(weights):
    packs = pack_equally(weights, 3)
    assert [len(pack) for pack in packs] == [4, 4, 4]
    assert sorted(item for pack in packs for item in pack) == list(range(12))


def test_impossible_sizes_are_named():
    with pytest.raises(ValueError, match="4 does not divide 18"):
        place_experts(torch.ones(1, 16), 18, 4, 2, 4)
    with pytest.raises(ValueError, match="needs a place for each of 16 experts, has 8"):
        place_experts(torch.ones(1, 16), 8, 4, 2, 4)
