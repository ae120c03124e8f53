"""Converts checkpoints: Hugging Face folders to this project's and back; Megatron-Core's to this project's.

    python tools/convert_checkpoint.py import Mixtral-8x7B-v0.1 runs/mixtral
    python tools/convert_checkpoint.py import --from megatron-core megatron/checkpoints runs/moe
    python pretrain_moe.py --config runs/mixtral/config.yaml --load runs/mixtral --finetune --save runs/tuned ...
    python tools/convert_checkpoint.py export runs/tuned mixtral-tuned --like Mixtral-8x7B-v0.1
    python tools/convert_checkpoint.py verify Mixtral-8x7B-v0.1 runs/mixtral

One process, no GPU; memory holds one tensor at a time (of one expert, where a layer has many). `verify` compares all
tensors bit for bit, then runs both models in float32 on the same tokens, for which both must fit in memory
(--tensors-only leaves that out).
Exit status 1: it could not be done, or the two differ.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_moe.checkpoint import checkpoint_path, find_latest
from megatron_moe.checkpoint.index import INDEX_FILE
from megatron_moe.config import load_config
from megatron_moe.convert.exporting import export_folder, prepare_export
from megatron_moe.convert.families import FAMILIES
from megatron_moe.convert.importing import (
    DTYPE_NAMES,
    Import,
    import_folder,
    prepare_import,
    prepare_megatron_import,
)
from megatron_moe.model.size import logical_tensors
from megatron_moe.training.conversion_check import compare_models, compare_tensors


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.epilog = "families: " + ", ".join(FAMILIES)
    commands = parser.add_subparsers(dest="command", required=True)
    importing = commands.add_parser("import", help="Hugging Face folder, or checkpoint of Megatron-Core -> checkpoint")
    importing.add_argument(
        "source", type=Path, help="folder with config.json and safetensors files; of Megatron: iter_... or the run"
    )
    importing.add_argument("out", type=Path, help="folder for the checkpoint; new or empty")
    importing.add_argument(
        "--from", dest="origin", choices=("huggingface", "megatron-core"), default="huggingface", help="what SOURCE is"
    )
    importing.add_argument(
        "--mtp",
        choices=("keep", "drop", "copy"),
        default="keep",
        help="multi-token-prediction modules; copy: where there are none, begin with copies of the last layer",
    )
    importing.add_argument(
        "--dtype", choices=DTYPE_NAMES, help="--params-dtype; default: the narrowest that loses nothing"
    )
    importing.add_argument(
        "--ignore-config-key", action="append", default=[], metavar="KEY", help="a key that you know to change nothing"
    )
    importing.add_argument(
        "--config",
        metavar="FILE",
        help="megatron-core: the model in settings of ours, if the checkpoint lacks arguments",
    )
    importing.add_argument(
        "--vocab-size", type=int, help="megatron-core: of the tokenizer; rows beyond are padding, and are cut"
    )
    exporting = commands.add_parser("export", help="checkpoint -> Hugging Face folder")
    exporting.add_argument("source", type=Path, help="checkpoint (iter_...), or the folder of a run: its latest")
    exporting.add_argument("out", type=Path, help="folder for the model; new or empty")
    exporting.add_argument("--family", choices=FAMILIES, help="default: that of the import, or the first that fits")
    exporting.add_argument(
        "--like", type=Path, help="take tokenizer, generation settings and neutral keys from this folder"
    )
    exporting.add_argument("--fused-experts", action="store_true", help="one tensor for all experts of a layer")
    exporting.add_argument("--mtp", choices=("keep", "drop"), default="keep", help="multi-token-prediction modules")
    exporting.add_argument("--dtype", choices=DTYPE_NAMES, help="round the weights; default: types are kept")
    exporting.add_argument("--max-shard-gb", type=float, default=5.0, help="largest safetensors file (default 5)")
    verifying = commands.add_parser("verify", help="are the two the same model?")
    verifying.add_argument("folder", type=Path, help="Hugging Face folder")
    verifying.add_argument("checkpoint", type=Path, help="checkpoint (iter_...), or the folder of a run: its latest")
    verifying.add_argument("--tensors-only", action="store_true", help="do not run the models")
    verifying.add_argument("--tokens", type=int, default=64, help="length of the two random sequences (default 64)")
    verifying.add_argument(
        "--tolerance", type=float, default=1e-4, help="of the logits, relative to the largest (1e-4)"
    )
    return parser


def one(folder: Path) -> Path:
    """The checkpoint that a folder is, or the latest that it holds. Raises ValueError."""
    if (folder / INDEX_FILE).exists():
        return folder
    iteration = find_latest(folder)
    if iteration is None:
        raise ValueError(f"{folder} is no checkpoint and holds none.")
    return checkpoint_path(folder, iteration)


def prepared(args: argparse.Namespace) -> Import:
    """The import that was asked for. Raises ValueError."""
    if args.origin == "huggingface":
        if args.config is not None or args.vocab_size is not None:
            raise ValueError("--config and --vocab-size are for --from megatron-core: config.json has both.")
        return prepare_import(
            args.source, logical_tensors, predictions=args.mtp, dtype=args.dtype, ignore=args.ignore_config_key
        )
    return prepare_megatron_import(
        args.source,
        logical_tensors,
        config=None if args.config is None else load_config(args.config),
        predictions=args.mtp,
        dtype=args.dtype,
        vocab_size=args.vocab_size,
        ignore=args.ignore_config_key,
    )


def run(args: argparse.Namespace) -> int:
    """Do what was asked for; exit status."""
    if args.command == "import":
        made = prepared(args)
        path = import_folder(made, args.out)
        print(f"{made.family.model_type}: {len(made.ours)} tensors, {made.config.training.params_dtype} -> {path}")
        return 0
    if args.command == "export":
        going = prepare_export(
            one(args.source),
            family=args.family,
            like=args.like,
            fused_experts=args.fused_experts,
            predictions=args.mtp,
            dtype=args.dtype,
        )
        export_folder(going, args.out, int(args.max_shard_gb * 2**30))
        print(f"{going.family.model_type}: {len(going.exported.tensors)} tensors -> {args.out}")
        if not going.companions:
            print("no tokenizer travels along: the checkpoint knows none; --like FOLDER takes one from there")
        return 0
    report = compare_tensors(args.folder, one(args.checkpoint))
    print(report)
    same = report.same
    if not args.tensors_only:
        outcome = compare_models(args.folder, one(args.checkpoint), num_tokens=args.tokens, tolerance=args.tolerance)
        print(outcome)
        same = same and outcome.same
    return int(not same)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 with a message for what the user can mend."""
    args = build_parser().parse_args(argv)
    try:
        return run(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
