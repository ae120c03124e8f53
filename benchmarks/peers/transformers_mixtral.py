"""bench-small in Hugging Face transformers: Mixtral, trained by a plain PyTorch loop, in one process.

    cd benchmarks && VENV/bin/python -m peers.transformers_mixtral --experts eager        # a loop over the experts
    cd benchmarks && VENV/bin/python -m peers.transformers_mixtral --experts grouped_mm   # torch's grouped product

Differs from bench-small in one thing: the balance loss is one over the tokens of all layers, not one per layer.
"""

import os
import sys

import small
import torch
import transformers
from small import parser, random_ids, report, start


def build(experts: str) -> transformers.MixtralForCausalLM:
    """Mixtral in bench-small's sizes, its experts computed as asked."""
    config = transformers.MixtralConfig(
        vocab_size=small.VOCABULARY,
        hidden_size=small.HIDDEN,
        intermediate_size=small.WIDTH,
        num_hidden_layers=small.LAYERS,
        num_attention_heads=small.HEADS,
        num_key_value_heads=small.GROUPS,
        head_dim=small.CHANNELS,
        num_local_experts=small.EXPERTS,
        num_experts_per_tok=small.TOPK,
        max_position_embeddings=small.SEQUENCE,
        tie_word_embeddings=False,
        use_cache=False,
        output_router_logits=True,  # without them there is no balance loss
        router_aux_loss_coef=small.BALANCE,
        sliding_window=None,
        attn_implementation="sdpa",
        experts_implementation=experts,
    )
    return transformers.MixtralForCausalLM(config).train()


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = parser(__doc__)
    options.add_argument("--experts", choices=["eager", "grouped_mm"], default="eager")
    arguments = options.parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing of this comes from the network
    start(arguments)
    torch.manual_seed(1)
    model = build(arguments.experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=small.LEARNING_RATE, weight_decay=small.WEIGHT_DECAY)
    generator = torch.Generator().manual_seed(7)

    def step() -> None:
        for _ in range(arguments.micro_batches):
            ids = random_ids(small.SEQUENCE, generator)
            (model(input_ids=ids, labels=ids).loss / arguments.micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), small.CLIP)
        optimizer.step()
        optimizer.zero_grad()

    chosen = model.config._experts_implementation
    assert chosen == arguments.experts, f"asked for {arguments.experts}, got {chosen}"
    framework = f"transformers {transformers.__version__} {arguments.experts}"
    report(step, small.TOKENS * arguments.micro_batches, arguments, framework=framework)
    return 0


if __name__ == "__main__":
    sys.exit(main())
