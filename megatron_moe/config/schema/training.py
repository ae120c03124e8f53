"""Training: optimizer, batch, length, precision, recomputation, faults."""

from dataclasses import dataclass

from megatron_moe.config.fields import flag


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer: AdamW and its learning-rate schedule."""

    lr: float = flag(3e-4, "Peak learning rate.")
    min_lr: float = flag(0.0, "Learning rate at the end of the decay.")
    lr_decay_style: str = flag(
        "cosine",
        "Shape of the decay.",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = flag(None, "Iterations until --min-lr. Default: --train-iters.")
    lr_decay_samples: int | None = flag(None, "The same in samples.")
    lr_warmup_iters: int = flag(0, "Iterations of linear warm-up.")
    lr_warmup_samples: int = flag(0, "The same in samples.")
    lr_warmup_fraction: float | None = flag(None, "The same as a share of the decay.")
    lr_warmup_init: float = flag(0.0, "Learning rate at the start of the warm-up.")
    lr_wsd_decay_iters: int | None = flag(None, "WSD: iterations of the final decay.")
    lr_wsd_decay_samples: int | None = flag(None, "The same in samples.")
    lr_wsd_decay_style: str = flag(
        "exponential", "WSD: shape of the final decay.", choices=("exponential", "linear", "cosine")
    )
    weight_decay: float = flag(0.01, "Decoupled weight decay; norms and biases have none.")
    adam_beta1: float = flag(0.9, "Decay of the first moment.")
    adam_beta2: float = flag(0.999, "Decay of the second moment.")
    adam_eps: float = flag(1e-8, "Epsilon of Adam.")
    clip_grad: float = flag(1.0, "Largest global gradient norm; 0 for no clipping.")


@dataclass(frozen=True)
class TrainingConfig:
    """Training: batch, length, precision, recomputation, evaluation, limits."""

    micro_batch_size: int = flag(1, "Sequences per rank and micro-batch (B).")
    global_batch_size: int | None = flag(
        None, "Sequences per optimizer step over all ranks. Default: micro-batch size x data-parallel size."
    )
    rampup_batch_size: tuple[int, ...] = flag(
        (), "Start, increment and samples: grow the global batch in equal steps over so many samples."
    )
    train_iters: int | None = flag(None, "Optimizer steps of the run.")
    train_samples: int | None = flag(None, "Length of the run in samples instead of steps.")
    seed: int = flag(1234, "Seed of weights, data order and random numbers in the model.")
    params_dtype: str = flag(
        "float32",
        "Type of compute and activations; master weights and moments are float32 (float64 for float64).",
        choices=("float32", "bfloat16", "float64"),
        synonyms={"--bf16": "bfloat16"},
    )
    recompute_granularity: str | None = flag(
        None,
        "Recompute activations in the backward pass: whole layers, or the modules named.",
        choices=("full", "selective"),
    )
    recompute_modules: tuple[str, ...] = flag(
        ("core_attn",),
        "Modules to recompute with --recompute-granularity selective: core_attn, mlp, moe, shared_experts, moe_act, "
        "layernorm, mla_up_proj.",
    )
    cpu_offloading_num_layers: int = flag(
        0,
        "Keep what the first so many layers of each pipeline stage save for the backward pass in host memory; copies "
        "run beside the computation.",
    )
    min_offloaded_tensor_size: int = flag(
        1024 * 1024, "Elements of the smallest tensor that --cpu-offloading-num-layers moves."
    )
    torch_compile: str = flag(
        "none",
        "Compile the parts of a block between its matrix products with torch.compile: into kernels (inductor; needs a "
        "C++ compiler), or traced and run operation by operation, to look for faults (aot_eager).",
        choices=("none", "inductor", "aot_eager"),
    )
    eval_interval: int = flag(1000, "Iterations between evaluations; 0 for none.")
    eval_iters: int = flag(10, "Global batches per evaluation.")
    exit_interval: int | None = flag(None, "Save and end after every so many iterations, to be started again.")
    exit_duration_in_mins: float | None = flag(None, "Save and end after so many minutes.")
    check_for_nan_in_loss_and_grad: bool = flag(
        True, "Look at loss and gradient norm before the weights are touched; --on-nonfinite says what then happens."
    )
    on_nonfinite: str = flag(
        "stop",
        "A loss or gradient norm that is not finite: end the run, skip the batch, or roll back to the last checkpoint "
        "and go on after the batch.",
        choices=("stop", "skip", "rollback"),
    )
    loss_spike_factor: float | None = flag(
        None, "A loss above so many times the median of recent ones is a spike: --on-spike. Default: none is."
    )
    grad_norm_spike_factor: float | None = flag(
        None, "A gradient norm above so many times the median of recent ones is a spike: --on-spike. Default: none is."
    )
    on_spike: str = flag(
        "skip", "A spike in loss or gradient norm: the same choices.", choices=("stop", "skip", "rollback")
    )
    check_weight_hash_across_dp_replicas_interval: int | None = flag(
        None, "Iterations between checks that all ranks which hold the same weights hold the same bits. Default: never."
    )
