"""bench-small around DeepSpeed's MoE layer, trained by DeepSpeed's engine.

    cd benchmarks && VENV/bin/python -m peers.deepspeed_moe
    cd benchmarks && VENV/bin/torchrun --standalone --nproc-per-node 2 -m peers.deepspeed_moe --ep 2

DeepSpeed ships the MoE layer but no model: the decoder around it is plain PyTorch. Dropless, it pads every expert to
the rows of the busiest one. Positions are rotary, attention is PyTorch's fused one.
"""

import importlib
import logging
import os
import sys
import warnings
from typing import Any

import small
import torch
import torch.nn.functional as F
from small import join, parser, random_ids, report
from torch import Tensor, nn

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("LOCAL_RANK", "0")  # asked for without a launcher, too
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import deepspeed  # noqa: E402
from deepspeed.moe.layer import MoE  # noqa: E402
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer  # noqa: E402

# Would compile a C++ extension for minutes at the first start; only inference_all_reduce uses it. Found by its path,
# since the attribute deepspeed.comm.torch is PyTorch itself.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None


class Expert(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(small.HIDDEN, 2 * small.WIDTH, bias=False)
        self.down = nn.Linear(small.WIDTH, small.HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Attention and DeepSpeed's MoE, each behind an RMSNorm."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(small.HIDDEN, eps=1e-5), nn.RMSNorm(small.HIDDEN, eps=1e-5)
        self.qkv = nn.Linear(small.HIDDEN, (small.HEADS + 2 * small.GROUPS) * small.CHANNELS, bias=False)
        self.proj = nn.Linear(small.HEADS * small.CHANNELS, small.HIDDEN, bias=False)
        self.moe = MoE(
            small.HIDDEN, Expert(), small.EXPERTS, ep, k=small.TOPK, drop_tokens=False, top2_2nd_expert_sampling=False
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (-1, small.CHANNELS)).transpose(1, 2)
        q, k, v = qkv.split([small.HEADS, small.GROUPS, small.GROUPS], 1)
        seen = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        x = x + self.proj(seen.transpose(1, 2).flatten(2))
        y, balance, _ = self.moe(self.norm_2(x))
        return x + y, balance


class Model(nn.Module):
    """Decoder; returns the loss."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(small.VOCABULARY, small.HIDDEN)
        self.blocks = nn.ModuleList(Block(ep) for _ in range(small.LAYERS))
        self.norm, self.head = nn.RMSNorm(small.HIDDEN, eps=1e-5), nn.Linear(small.HIDDEN, small.VOCABULARY, bias=False)
        frequencies = 10000.0 ** (-torch.arange(0, small.CHANNELS, 2) / small.CHANNELS)
        angles = torch.outer(torch.arange(small.SEQUENCE), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, balance = self.embedding(ids), torch.zeros(())
        for block in self.blocks:
            x, more = block(x, self.cos, self.sin)
            balance = balance + more
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten()) + small.BALANCE * balance


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (arXiv:2104.09864), halves paired."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = parser(__doc__)
    options.add_argument("--ep", type=int, default=1)
    arguments = options.parse_args(argv)
    rank, world = join(arguments)
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(1234)
    model = Model(arguments.ep)
    # ZeRO-free AdamW, experts in parameter groups of their own, since their gradients are averaged over fewer ranks.
    groups: Any = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": ""})
    config = {
        "train_micro_batch_size_per_gpu": small.MICRO_BATCH,
        "gradient_accumulation_steps": arguments.micro_batches,
        "gradient_clipping": small.CLIP,
        "steps_per_print": 1_000_000_000,
    }
    optimizer = torch.optim.AdamW(groups, lr=small.LEARNING_RATE, weight_decay=small.WEIGHT_DECAY)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    generator = torch.Generator().manual_seed(7 + rank)

    def step() -> None:
        for _ in range(arguments.micro_batches):
            ids = random_ids(small.SEQUENCE + 1, generator)
            engine.backward(engine(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))
            engine.step()

    framework = f"deepspeed {deepspeed.__version__}"
    report(step, small.TOKENS * arguments.micro_batches * world, arguments, framework=framework)
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
