"""bench-small in Megatron-Core 0.19.2, with its own model, schedules, data parallelism and optimizer.

    cd benchmarks && VENV/bin/python -m peers.megatron_core
    cd benchmarks && VENV/bin/torchrun --standalone --nproc-per-node 2 -m peers.megatron_core --ep 2
    ... --tp 2        ... --pp 2 --micro-batches 4

On CPU there are neither Transformer Engine nor its grouped products: the layers are Megatron's local ones, experts one
after another, fused activations through ``torch.compile`` (which wants a C++ compiler).
"""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import small
import torch
import torch.nn.functional as F
from peers import megatron_on_cpu
from small import join, parser, random_ids, report
from torch import Tensor

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # asked for at start-up by sequence parallelism
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
megatron_on_cpu.before_import()

import megatron.core as mcore  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

megatron_on_cpu.after_import()


def settings(arguments: argparse.Namespace) -> TransformerConfig:
    """bench-small in Megatron's words; expert tensor parallelism is tensor parallelism, its default."""
    return TransformerConfig(
        num_layers=small.LAYERS,
        hidden_size=small.HIDDEN,
        num_attention_heads=small.HEADS,
        num_query_groups=small.GROUPS,
        kv_channels=small.CHANNELS,
        ffn_hidden_size=small.WIDTH,
        moe_ffn_hidden_size=small.WIDTH,
        num_moe_experts=small.EXPERTS,
        moe_router_topk=small.TOPK,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=small.BALANCE,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        masked_softmax_fusion=False,  # a CUDA kernel, as are the two below
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=arguments.tp,
        sequence_parallel=arguments.tp > 1,  # Megatron's condition for MoE under tensor parallelism
        pipeline_model_parallel_size=arguments.pp,
        expert_model_parallel_size=arguments.ep,
        deallocate_pipeline_outputs=True,
        batch_p2p_comm=False,  # batched sends end with torch.cuda.synchronize
    )


def build(config: TransformerConfig) -> tuple[DistributedDataParallel, Any]:
    """The model of this rank and its optimizer."""
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=small.EXPERTS, normalization="RMSNorm"),
        vocab_size=small.VOCABULARY,
        max_sequence_length=small.SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    parallel = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    adam = OptimizerConfig(
        optimizer="adam",
        lr=small.LEARNING_RATE,
        weight_decay=small.WEIGHT_DECAY,
        clip_grad=small.CLIP,
        params_dtype=torch.float32,
    )
    optimizer = get_megatron_optimizer(adam, [parallel], use_gloo_process_groups=False)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    return parallel, optimizer


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = parser(__doc__)
    for axis in ("ep", "tp", "pp"):
        options.add_argument(f"--{axis}", type=int, default=1)
    arguments = options.parse_args(argv)
    rank, world = join(arguments)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=arguments.tp,
        pipeline_model_parallel_size=arguments.pp,
        expert_model_parallel_size=arguments.ep,
        create_gloo_process_groups=False,  # the groups are gloo's already
    )
    model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234 + rank)
    model, optimizer = build(settings(arguments))
    generator = torch.Generator().manual_seed(7 + parallel_state.get_data_parallel_rank())
    mask = torch.ones(1, 1, small.SEQUENCE, small.SEQUENCE, dtype=torch.bool).triu(1)  # True: may not be seen
    positions = torch.arange(small.SEQUENCE).expand(small.MICRO_BATCH, -1)

    def forward(_: Iterator[Any], stage: DistributedDataParallel) -> tuple[Tensor, Any]:
        ids = random_ids(small.SEQUENCE + 1, generator)
        output = stage(ids[:, :-1].contiguous(), positions, mask, labels=ids[:, 1:].contiguous())
        return output, lambda losses: (losses.float().mean(), {})

    run = get_forward_backward_func()

    def step() -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        run(
            forward_step_func=forward,
            data_iterator=iter(()),
            model=model,
            num_microbatches=arguments.micro_batches,
            seq_length=small.SEQUENCE,
            micro_batch_size=small.MICRO_BATCH,
            forward_only=False,
        )
        updated, _, _ = optimizer.step()
        assert updated, "the gradient is not finite"

    replicas = world // (arguments.tp * arguments.pp)
    framework = f"megatron-core {mcore.__version__}"
    report(step, small.TOKENS * arguments.micro_batches * replicas, arguments, framework=framework)
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
