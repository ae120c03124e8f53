"""The dense reference against the oracle's whole layer: outputs and every gradient."""

import torch
import torch.nn.functional as F
from moe_oracle import both_types, close, inputs_of, load_cases, topk_config

from megatron_moe.moe.capacity import apply_capacity
from megatron_moe.moe.reference import reference_moe
from megatron_moe.moe.routers.topk import topk


def swiglu(weights, rows):
    """Apply one expert given as (gate [F, D], up [F, D], down [D, F])."""
    w_gate, w_up, w_down = weights
    return F.linear(F.silu(F.linear(rows, w_gate)) * F.linear(rows, w_up), w_down)


@both_types
@load_cases("moe_layer")
def test_moe_layer(case, dtype):
    given, params, expected = case["inputs"], case["params"], case["expected"]

    def leaf(values):
        return torch.tensor(values, dtype=dtype).requires_grad_()

    x_TD, w_router_ED = leaf(given["x"]), leaf(given["w_router"])
    experts = [[leaf(w) for w in expert] for expert in given["experts"]]
    shared = [[leaf(w) for w in expert] for expert in given["shared"]]
    bias_E = torch.tensor(given["bias"], dtype=dtype) if "bias" in given else None

    logits_GTE = F.linear(x_TD, w_router_ED).unsqueeze(0)
    inputs = inputs_of(logits_GTE, bias_E=bias_E)
    choice = topk(inputs, topk_config(logits_GTE, params))
    assert choice.expert_ids_GTK[0].tolist() == expected["indices"]
    if params.get("drop_policy"):
        choice = apply_capacity(choice, params["capacity"], params["drop_policy"], inputs.uniform)
    y_TD = reference_moe(x_TD.unsqueeze(0), choice, lambda e, rows: swiglu(experts[e], rows))[0]
    y_TD = y_TD + sum(swiglu(weights, x_TD) for weights in shared)
    close(y_TD, expected["y"], dtype)

    (y_TD * torch.tensor(given["dy"], dtype=dtype)).sum().backward()
    close(x_TD.grad, expected["dx"], dtype)
    close(w_router_ED.grad, expected["dw_router"], dtype)
    for ours, theirs in ((experts, expected["dw_experts"]), (shared, expected["dw_shared"])):
        for our_weights, their_weights in zip(ours, theirs, strict=True):
            for weight, gradient in zip(our_weights, their_weights, strict=True):
                close(weight.grad, gradient, dtype)
