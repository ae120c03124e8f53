"""Every rule with a configuration that breaks it and one that keeps it."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_moe.config import Config, check
from megatron_moe.config.checks import bounds
from megatron_moe.config.checks.run import ALWAYS, TO_TRAIN
from megatron_moe.config.settings import Registries, assemble, settings

MOE = {"num_experts": 8}
TP2, TP4 = {"tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 4}


def sel(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


# rule, world size, values that break it, values that keep it, part of the sentence
CASES: list[tuple[str, int, dict[str, Any], dict[str, Any], str]] = [
    (
        "heads_divide_hidden_size", 1, {"hidden_size": 100}, {"hidden_size": 100, "kv_channels": 12},
        "--num-attention-heads 8 does not divide --hidden-size 100; use --hidden-size 96 or 104, or "
        "--num-attention-heads 1, 2, 4, 5, 10, 20, 25, 50 ..., or",
    ),
    (
        "query_groups_divide_heads", 1, {"num_query_groups": 3}, {"num_query_groups": 4},
        "--num-query-groups 3 does not divide --num-attention-heads 8; use --num-query-groups 1, 2, 4 or 8.",
    ),
    (
        "heads_divide_over_tensor_parallel", 4,
        {**TP4, "num_attention_heads": 6, "hidden_size": 240, "ffn_hidden_size": 64},
        {**TP4, "num_attention_heads": 8, "hidden_size": 240, "ffn_hidden_size": 64},
        "--num-attention-heads 6 does not divide over --tensor-model-parallel-size 4; "
        "use --num-attention-heads 4 or 8, or --tensor-model-parallel-size 1, 2, 3 or 6.",
    ),
    (
        "query_groups_fit_tensor_parallel", 4,
        {**TP4, "num_attention_heads": 12, "hidden_size": 768, "num_query_groups": 6},
        {**TP4, "num_attention_heads": 12, "hidden_size": 768, "num_query_groups": 2},
        "--num-query-groups 6 and --tensor-model-parallel-size 4 do not fit: one must divide the other, so that "
        "key-value heads are cut or copied evenly; use --num-query-groups 1, 2, 4 or 12.",
    ),
    (
        "dense_ffn_divides_over_tensor_parallel", 2, {**TP2, "ffn_hidden_size": 99},
        {**TP2, **MOE, "ffn_hidden_size": 99, "moe_layer_freq": "1", "moe_ffn_hidden_size": 64},
        "--ffn-hidden-size 99 does not divide over --tensor-model-parallel-size 2; use --ffn-hidden-size 98 or 100",
    ),
    (
        "rotary_channels_are_even", 1, {"kv_channels": 10, "rotary_percent": 0.5},
        {"kv_channels": 5, "position_embedding_type": "none"},
        "--rotary-percent 0.5 of 10 channels per head rotates 5, but channels rotate in pairs;",
    ),
    (
        "topk_needs_so_many_experts", 1, {"num_experts": 2, "moe_router_topk": 3}, {"num_experts": 2},
        "--moe-router-topk 3 asks for more experts than --num-experts 2; use at most 2.",
    ),
    ("layer_pattern_can_be_read", 1, {**MOE, "moe_layer_freq": "[0]*"}, {"moe_layer_freq": "[0]*"}, "cannot be read"),
    (
        "layer_pattern_can_be_read", 1, {**MOE, "moe_layer_freq": "[0,1]"}, {**MOE, "moe_layer_freq": "[0,1]*2"},
        "it needs one entry, 0 or 1, for each of the --num-layers 4.",
    ),
    (
        "layer_pattern_can_be_read", 1, {**MOE, "num_layers": 1}, {**MOE, "num_layers": 1, "moe_layer_freq": "1"},
        "No layer is MoE although --num-experts 8 is given: --moe-layer-freq none,",
    ),
    (
        "experts_divide_over_expert_parallel", 3, {**MOE, "expert_model_parallel_size": 3},
        {"num_experts": 9, "expert_model_parallel_size": 3},
        "--num-experts 8 does not divide over --expert-model-parallel-size 3; use --num-experts 6 or 9, or "
        "--expert-model-parallel-size 1, 2, 4 or 8.",
    ),
    (
        "experts_divide_over_expert_parallel", 2, {"expert_model_parallel_size": 2},
        {**MOE, "expert_model_parallel_size": 2}, "--expert-model-parallel-size 2 needs experts to share out;",
    ),
    (
        "expert_ffn_divides_over_expert_tensor_parallel", 2, {**MOE, **TP2, "moe_ffn_hidden_size": 33},
        {**MOE, **TP2, "moe_ffn_hidden_size": 33, "expert_tensor_parallel_size": 1},
        "--moe-ffn-hidden-size 33 does not divide over --expert-tensor-parallel-size 2 (by default); use",
    ),
    (
        "shared_expert_divides_over_tensor_parallel", 2,
        {**MOE, **TP2, "moe_shared_expert_intermediate_size": 33},
        {**MOE, **TP2, "moe_shared_expert_intermediate_size": 34, "moe_shared_expert_gate": True},
        "--moe-shared-expert-intermediate-size 33 does not divide over --tensor-model-parallel-size 2;",
    ),
    (
        "shared_expert_divides_over_tensor_parallel", 1, {**MOE, "moe_shared_expert_gate": True}, MOE,
        "--moe-shared-expert-gate has no shared expert to weigh;",
    ),
    (
        "group_is_whole", 1, {**MOE, "moe_group_size": "sequnce"}, {**MOE, "moe_group_size": "sequence"},
        "--moe-group-size sequnce cannot be read; give 'sequence' or a number of tokens, such as 64, 128 or 256.",
    ),
    (
        "group_is_whole", 1, {**MOE, "moe_group_size": "100"}, {**MOE, "moe_group_size": "64"},
        "--moe-group-size 100 does not divide --seq-length 256;",
    ),
    (
        "group_is_whole", 1, {**MOE, "moe_group_size": "400"}, {**MOE, "moe_group_size": "256"},
        "is some whole sequences: use 256 or 512.",
    ),
    (
        "group_is_whole", 1, {**MOE, "moe_group_size": "512", "micro_batch_size": 3},
        {**MOE, "moe_group_size": "512", "micro_batch_size": 4},
        "--moe-group-size 512 is 2 sequences, which do not divide --micro-batch-size 3; a group lies inside one "
        "micro-batch: use a group of 256 or 768 tokens, or a micro-batch of 2 or 4 sequences.",
    ),
    (
        "dense_sizes_divide_world", 6, TP4, TP2,
        "--tensor-model-parallel-size 4 x --context-parallel-size 1 x --pipeline-model-parallel-size 1 = 4 does not "
        "divide the 6 ranks; start 4 or 8 ranks, or choose sizes with a product of 1, 2, 3 or 6.",
    ),
    (
        "expert_sizes_divide_world", 6, {**MOE, **TP2, "expert_model_parallel_size": 2},
        {**MOE, **TP2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        "--expert-tensor-parallel-size 2 x --expert-model-parallel-size 2 x --pipeline-model-parallel-size 1 = 4 does "
        "not divide the 6 ranks;",
    ),
    (
        "sequence_divides_over_ranks", 2, {"context_parallel_size": 2, "seq_length": 6},
        {"context_parallel_size": 2, "seq_length": 8},
        "--seq-length 6 does not divide: --context-parallel-size 2 cuts it into 4 pieces, two for each rank; use 4 or 8.",
    ),
    (
        "sequence_divides_over_ranks", 4, {**MOE, **TP4, "seq_length": 6}, {**TP4, "seq_length": 6},
        "--seq-length 6 does not divide: sequence parallelism over --tensor-model-parallel-size 4 cuts it into 4;",
    ),
    (
        "sequence_divides_over_ranks", 8, {**TP4, "sequence_parallel": True, "context_parallel_size": 2, "seq_length": 12},
        {**TP4, "sequence_parallel": True, "context_parallel_size": 2, "seq_length": 16}, "use 8 or 16.",
    ),
    (
        "micro_batches_fill_global_batch", 4, {"global_batch_size": 12, "micro_batch_size": 2},
        {"global_batch_size": 16, "micro_batch_size": 2},
        "--global-batch-size 12 is not a multiple of --micro-batch-size 2 x data-parallel size 4; use a global batch of "
        "8 or 16, or a micro-batch of 1 or 3.",
    ),
    (
        "rampup_reaches_global_batch", 1, {"rampup_batch_size": (2, 2), "global_batch_size": 8},
        {"rampup_batch_size": (2, 2, 100), "global_batch_size": 8}, "--rampup-batch-size 2 2 needs three numbers",
    ),
    (
        "rampup_reaches_global_batch", 1, {"rampup_batch_size": (2, 2, 100)}, {}, "needs --global-batch-size",
    ),
    (
        "rampup_reaches_global_batch", 1, {"rampup_batch_size": (2, 4, 100), "global_batch_size": 8},
        {"rampup_batch_size": (8, 4, 100), "global_batch_size": 8},
        "does not lead from 2 to --global-batch-size 8 in steps of 4; use an increment of 1, 2, 3 or 6.",
    ),
    (
        "rampup_reaches_global_batch", 2, {"rampup_batch_size": (2, 3, 9), "global_batch_size": 8},
        {"rampup_batch_size": (2, 2, 9), "global_batch_size": 8},
        "the increment 3 is not a multiple of --micro-batch-size 1 x data-parallel size 2; use 2 or 4.",
    ),
    (
        "length_is_given_once", 1, {"train_samples": 9}, {},
        "--train-iters 10 and --train-samples 9 both set the length of the run; give one of them.",
    ),
    (
        "decay_and_warmup_are_given_once", 1, {"lr_warmup_iters": 1, "lr_warmup_fraction": 0.1},
        {"lr_warmup_fraction": 0.1},
        "--lr-warmup-iters 1 and --lr-warmup-fraction 0.1 all set the length of the warm-up; give one of them.",
    ),
    (
        "decay_and_warmup_are_given_once", 1, {"lr_decay_iters": 10, "lr_decay_samples": 10}, {"lr_decay_samples": 10},
        "the length of the decay; give one of them.",
    ),
    (
        "decay_and_warmup_are_given_once", 1, {"lr_decay_style": "WSD"},
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 2}, "--lr-decay-style WSD needs the length of its final decay;",
    ),
    (
        "warmup_ends_before_decay", 1, {"lr_warmup_iters": 11}, {"lr_warmup_iters": 11, "lr_decay_iters": 20},
        "--lr-warmup-iters 11 do not fit into --train-iters 10; together they may take at most 10 iters.",
    ),
    (
        "warmup_ends_before_decay", 1, {"lr_warmup_iters": 6, "lr_decay_style": "WSD", "lr_wsd_decay_iters": 5},
        {"lr_warmup_iters": 6, "lr_wsd_decay_iters": 5},
        "--lr-warmup-iters 6 and --lr-wsd-decay-iters 5 do not fit into --train-iters 10;",
    ),
    (
        "learning_rates_are_ordered", 1, {"min_lr": 1.0}, {"min_lr": 1.0, "lr": 1.0},
        "--min-lr 1.0 is above the peak --lr 0.0003; use at most 0.0003.",
    ),
    (
        "recomputation_is_known", 1, sel("core_atn"), sel("mlp", "moe"),
        "--recompute-modules core_atn is not a list of modules to recompute; name one or more of core_attn,",
    ),
    ("recomputation_is_known", 1, sel(), {"recompute_modules": ()}, "--recompute-modules none is not"),
    (
        "data_has_one_source", 1, {"data_path": ("a",)}, {"data_path": ("a",), "mock_data": False},
        "--data-path and --mock-data exclude each other;",
    ),
    (
        "data_has_one_source", 1, {"data_path": ("a",), "test_data_path": ("b",), "mock_data": False},
        {"train_data_path": ("a",), "test_data_path": ("b",), "mock_data": False},
        "--data-path and --test-data-path exclude each other; --data-path is cut by --split",
    ),
    ("split_can_be_read", 1, {"split": "0,0"}, {"split": "1"}, "--split 0,0 cannot be read; give up to three shares"),
    ("split_can_be_read", 1, {"split": "1,x"}, {"split": "0.9, 0.1"}, "--split 1,x cannot be read"),
    (
        "tokenizer_has_its_file", 1, {"tokenizer_type": "first_other"},
        {"tokenizer_type": "first_other", "tokenizer_model": "m"}, "--tokenizer-type first_other needs its file",
    ),
    ("saving_has_a_folder", 1, {"save_interval": 5}, {"save_interval": 5, "save": "s"}, "--save-interval 5 has no folder"),
    (
        "saving_has_a_folder", 1, {"exit_interval": 5}, {"exit_interval": 5, "save": "s"},
        "--exit-interval 5 would end the run and lose it; give --save.",
    ),
    ("loading_has_a_folder", 1, {"finetune": True}, {"finetune": True, "load": "l"}, "--finetune needs a checkpoint"),
    ("loading_has_a_folder", 1, {"ckpt_step": 5}, {"ckpt_step": 5, "save": "s"}, "--ckpt-step 5 has no folder"),
    ("length_is_given", 1, {"train_iters": None}, {}, "The length of the run is missing;"),
    ("data_is_given", 1, {"mock_data": False}, {"train_data_path": ("a",), "mock_data": False}, "There is no training data;"),
    ("out_of_range", 1, {"num_layers": 0}, {}, "--num-layers 0 is out of range; give at least 1."),
    ("out_of_range", 1, {"num_experts": 0}, {}, "--num-experts 0 is out of range; give at least 1 or none."),
    ("out_of_range", 1, {"lr": -1.0}, {"lr": 0.0}, "--lr -1.0 is out of range; give at least 0."),
    ("out_of_range", 1, {"norm_epsilon": 0.0}, {}, "--norm-epsilon 0.0 is out of range; give more than 0."),
    ("out_of_range", 1, {"rotary_percent": 1.5}, {}, "give more than 0 and at most 1."),
    ("out_of_range", 1, {"adam_beta2": 1.0}, {"adam_beta2": 0.0}, "give at least 0 and less than 1."),
    ("out_of_range", 1, {"moe_aux_loss_coeff": (0.1, -1.0)}, {}, "--moe-aux-loss-coeff 0.1 -1.0 is out of range;"),
    ("unknown_names", 1, {"activation": "swigul"}, {}, "--activation: 'swigul' is not one of swiglu"),
    ("unknown_names", 1, {"moe_router": "second_othr"}, {"moe_router": "second_other"}, "did you mean second_other?"),
]  # fmt: skip

GOOD = {"train_iters": 10, "mock_data": True}


@pytest.mark.parametrize("case", CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)])
def test_rule(case: tuple[str, int, dict[str, Any], dict[str, Any], str], registries: Registries) -> None:
    _, world_size, bad, good, message = case
    found = check(assemble({**GOOD, **bad}), world_size, registries)
    assert len([problem for problem in found if message in problem]) == 1, found
    for problem in found:
        assert re.search(r"--[a-z]", problem) and problem[-1] in ".?", problem
    found = check(assemble({**GOOD, **good}), world_size, registries)
    assert found == []


def test_every_rule_has_a_case() -> None:
    cased = {case[0] for case in CASES}
    assert {rule.__name__ for rule in (*ALWAYS, *TO_TRAIN)} <= cased


def test_every_number_has_a_range() -> None:
    numbers = {name for name, setting in settings().items() if setting.base in (int, float)}
    assert numbers == set(bounds.RANGES), "give new settings a range in checks/bounds.py"


def test_defaults_are_well_and_lack_only_data_and_length(registries: Registries) -> None:
    assert check(Config(), 1, registries, to_train=False) == []
    assert len(check(Config(), 1, registries)) == 2


def test_all_problems_at_once_with_the_rules_of_others(registries: Registries) -> None:
    def schedule(config: Config, world_size: int) -> Iterator[str]:
        yield f"--pipeline-schedule {config.parallel.pipeline_schedule} wants more than {world_size} ranks."

    values = {**GOOD, "lr": -1.0, "hidden_size": 100, "split": "x", "train_samples": 3}
    found = check(assemble(values), 1, registries, extra=[schedule])
    starts = ["--lr", "--num-attention-heads", "--train-iters", "--min-lr", "--split", "--pipeline-schedule"]
    assert [problem.split(" ")[0] for problem in found] == starts


def test_sizes_out_of_range_stop_the_rules_that_divide_by_them(registries: Registries) -> None:
    found = check(assemble({**GOOD, "num_attention_heads": 0, "micro_batch_size": 0, "lr": -1.0}), 1, registries)
    assert len(found) == 3 and all("out of range" in problem for problem in found)
