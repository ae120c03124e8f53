"""Makes a mixture of experts of a dense model: a Hugging Face folder (Llama, Qwen2, Qwen3), or a checkpoint of ours.

    python tools/upcycle.py Qwen3-0.6B runs/qwen-8x2 --expansion 8 --topk 2
    python tools/upcycle.py runs/dense runs/fine --expansion 8 --granularity 8 --topk 8
    python pretrain_moe.py --config runs/fine/config.yaml --load runs/fine --finetune --save runs/tuned ...

The mixture begins with the dense model's function, exactly, unless --pre-softmax or another --scaling is asked for.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_moe.checkpoint import checkpoint_path, find_latest
from megatron_moe.checkpoint.streaming import write_weights
from megatron_moe.checkpoint.tensor_files import Described
from megatron_moe.config import dump
from megatron_moe.config.patterns import moe_layer_pattern
from megatron_moe.config.schema import Config
from megatron_moe.convert.exporting import Weights, config_of
from megatron_moe.convert.huggingface import CONFIG, finished_folder
from megatron_moe.convert.importing import COMPANION_FOLDER, prepare_import, with_tokenizer
from megatron_moe.convert.quantised import Source
from megatron_moe.convert.upcycling import SCALINGS, Imported, Upcycling, moe_config, upcycled_pieces
from megatron_moe.model.size import logical_tensors


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="dense model: Hugging Face folder, checkpoint, or folder of a run")
    parser.add_argument("out", type=Path, help="folder for the checkpoint; new or empty")
    parser.add_argument("--expansion", type=int, required=True, help="copies of each feed-forward layer (E)")
    parser.add_argument(
        "--granularity", type=int, default=1, help="shards of each copy (G); experts are E G (default 1)"
    )
    parser.add_argument("--topk", type=int, help="experts per token (default 2 G)")
    parser.add_argument("--layers", default="1", help='which layers, as --moe-layer-freq: 1 (all), 2, "[0]*2+[1]*10"')
    parser.add_argument("--pre-softmax", action="store_true", help="softmax over all experts before the choice")
    parser.add_argument("--scaling", choices=SCALINGS, help="default: exact; with --pre-softmax, paper")
    parser.add_argument("--router-std", type=float, default=0.02, help="of the router's initial rows (default 0.02)")
    parser.add_argument("--seed", type=int, default=1234, help="of the router")
    return parser


def dense_model(source: Path, out: Path) -> tuple[Config, Source, list[Path]]:
    """Configuration, weights by our names, and the files that travel along."""
    if (source / CONFIG).exists():
        made = prepare_import(source, logical_tensors)
        return with_tokenizer(made, out), Imported(made), list(made.companions)
    path = source
    if not (source / "index.json").exists():
        iteration = find_latest(source)
        if iteration is None:
            raise ValueError(f"{source} is no Hugging Face folder, no checkpoint, and holds none.")
        path = checkpoint_path(source, iteration)
    return config_of(path), Weights(path), []


def run(args: argparse.Namespace) -> str:
    """Upcycle; what to say of it."""
    dense, weights, companions = dense_model(args.source, args.out)
    how = Upcycling(
        expansion=args.expansion,
        granularity=args.granularity,
        topk=2 * args.granularity if args.topk is None else args.topk,
        pre_softmax=args.pre_softmax,
        scaling=args.scaling or ("paper" if args.pre_softmax else "exact"),
        layers=moe_layer_pattern(args.layers, dense.model.num_layers, 0),
        router_std=args.router_std,
        seed=args.seed,
    )
    config = moe_config(dense, how)
    described = {name: Described(*value) for name, value in logical_tensors(config).items()}
    tensors = dict(sorted(described.items(), key=lambda item: -item[1].dtype.itemsize))
    text = dump(replace(config, checkpoint=type(config.checkpoint)()))
    with finished_folder(args.out) as unfinished:
        for path in companions:
            (unfinished / COMPANION_FOLDER).mkdir(exist_ok=True)
            shutil.copy2(path, unfinished / COMPANION_FOLDER)
        (unfinished / "config.yaml").write_text(text, encoding="utf-8")
        pieces = upcycled_pieces(weights, config, tensors, how)
        write_weights(unfinished, 0, tensors, pieces, {"consumed_samples": 0, "optimizer_steps": 0}, text)
    begins = "the dense model's function, exactly" if how.preserves_function else "a function near the dense model's"
    experts = f"{config.moe.num_experts} experts of width {config.moe.moe_ffn_hidden_size}"
    return f"{experts} -> {args.out}; it begins with {begins}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 with a message for what the user can mend."""
    args = build_parser().parse_args(argv)
    try:
        print(run(args))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
