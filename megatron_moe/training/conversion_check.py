"""Are a Hugging Face folder and a checkpoint of ours the same model? By their bits, and by what they compute.

    tensors   each tensor of theirs against what an export of ours would write, bit for bit
    models    both on the same tokens: logits, the residual stream after each layer, the experts of each token

The bits alone do not prove it: a wrong table, read in both directions, gives back what it took. The models do.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_moe.checkpoint.offline import read_run
from megatron_moe.config.schema import Config, ParallelConfig
from megatron_moe.convert.configuration import family_of
from megatron_moe.convert.exporting import Weights, config_of
from megatron_moe.convert.families import FAMILIES
from megatron_moe.convert.huggingface import CONFIG, HuggingFaceFolder, read_json
from megatron_moe.convert.importing import record_of
from megatron_moe.convert.moving import Exported, plan_import
from megatron_moe.convert.quantised import Dequantised, Source
from megatron_moe.model.decoder import Decoder
from megatron_moe.model.generation import whole_batch
from megatron_moe.moe.gate import Gate
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.sharding import sharded_parameters

_SHOWN = 10


@dataclass
class TensorReport:
    """Tensors that are the same bit for bit, and those that are not, with what differs."""

    num_same: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def __str__(self) -> str:
        lines = [f"tensors: {self.num_same} are the same, bit for bit; {len(self.differences)} differ"]
        return "\n  ".join(lines + self.differences[:_SHOWN] + ["..."] * (len(self.differences) > _SHOWN))


def compare_tensors(folder: str | Path, checkpoint: Path) -> TensorReport:
    """Compare all tensors, one at a time.

    Raises:
        ValueError: either cannot be read, or they are not of the same configuration.
    """
    hf = HuggingFaceFolder(folder)
    source = Dequantised(hf, hf.config.get("quantization_config"))
    config = config_of(checkpoint)
    weights = Weights(checkpoint)
    without = config.model.mtp_num_layers is None
    family = family_of(hf.config, FAMILIES)
    num_layers = config.model.num_layers
    plan = plan_import(family, source, weights.tensors, num_layers, drop_predictions=without)
    dtypes = record_of(read_run(checkpoint)["scalars"]).get("dtypes", {})
    exported = Exported(plan, weights.tensors, weights, dtypes)
    report, differing = TensorReport(), {}
    for piece, ours in exported.pieces():
        difference = _difference(source.read(piece.name, piece.row), ours)
        if difference:
            differing.setdefault(piece.name, difference if piece.row is None else f"expert {piece.row}: {difference}")
    report.num_same = len(exported.tensors) - len(differing)
    report.differences = [f"{name}: {what}" for name, what in differing.items()]
    return report


def _difference(theirs: Tensor, ours: Tensor) -> str | None:
    if theirs.dtype != ours.dtype or theirs.shape != ours.shape:
        return f"{theirs.dtype} {list(theirs.shape)} in the folder, {ours.dtype} {list(ours.shape)} from the checkpoint"
    if torch.equal(theirs.contiguous().view(-1).view(torch.uint8), ours.contiguous().view(-1).view(torch.uint8)):
        return None
    return f"largest difference {float((theirs.double() - ours.double()).abs().max()):.3g}"


@dataclass
class ModelReport:
    """How far two models are apart; errors are relative to the largest value.

    Attributes:
        logits: largest difference of the logits.
        layers: the same of the residual stream after each layer.
        routing: of each MoE layer, the share of tokens with the same experts; empty where theirs cannot be asked.
    """

    logits: float
    layers: list[float]
    routing: dict[int, float]
    tolerance: float

    @property
    def same(self) -> bool:
        """Whether the logits agree."""
        return self.logits <= self.tolerance  # False for NaN

    def __str__(self) -> str:
        verdict = "the same" if self.same else "NOT the same"
        lines = [f"models: {verdict}; logits differ by {self.logits:.2g}, tolerance {self.tolerance:.2g} (relative)"]
        for layer, error in enumerate(self.layers):
            routed = f", {self.routing[layer]:.2%} of the tokens have the same experts" if layer in self.routing else ""
            lines.append(f"  layer {layer}: residual stream differs by {error:.2g}{routed}")
        return "\n".join(lines)


def our_model(checkpoint: Path, dtype: str) -> Decoder:
    """The model of a checkpoint in one process, in another type."""
    return model_of(config_of(checkpoint), Weights(checkpoint), dtype)


def model_of(config: Config, weights: Source, dtype: str) -> Decoder:
    """A model of ours with given weights."""
    config = replace(
        config.as_stored(), parallel=ParallelConfig(), training=replace(config.training, params_dtype=dtype)
    )
    ctx = ParallelContext.single()
    model = Decoder(config, ctx, initial_values=False)
    with torch.no_grad():
        for name, parameter in sharded_parameters(model).items():
            parameter.logical(parameter.data, ctx).copy_(weights.read(name))
        for name, buffer in model.named_buffers():
            if name in weights.tensors:
                buffer.copy_(weights.read(name))
    return model.eval()


def their_model(folder: str | Path, dtype: torch.dtype) -> nn.Module:
    """The model of a folder by transformers.

    Raises:
        ValueError: transformers finds tensors missing, left over or of another shape.
    """
    import transformers

    # Version 5 has fused products that ask for aligned sizes; before it there was but one way.
    options = {"experts_implementation": "eager"} if int(transformers.__version__.split(".")[0]) >= 5 else {}
    options |= {"attn_implementation": "eager", "local_files_only": True, "output_loading_info": True}
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, **options)
    model, found = loaded
    problems = {kind: sorted(map(str, names)) for kind, names in found.items() if names}
    if problems:
        raise ValueError(f"transformers does not load {folder} cleanly: {problems}")
    return model.eval()


def compare_models(
    folder: str | Path, checkpoint: Path, *, num_tokens: int = 64, tolerance: float = 1e-4, dtype: str = "float32"
) -> ModelReport:
    """Load both and run them on the same random tokens."""
    theirs, ours = their_model(folder, getattr(torch, dtype)), our_model(checkpoint, dtype)
    vocab_size = int(read_json(Path(folder) / CONFIG)["vocab_size"])
    ids_BS = torch.randint(0, vocab_size, (2, num_tokens), generator=torch.Generator().manual_seed(1))
    return compare(theirs, ours, ids_BS, tolerance)


@torch.no_grad()
def compare(theirs: Any, ours: Decoder, ids_BS: Tensor, tolerance: float) -> ModelReport:
    """Run both models on tokens [B, S] of more than one position: position 0 hides the rotary embedding."""
    their_layers: dict[int, Tensor] = {}
    their_experts: dict[int, Tensor] = {}
    our_layers: dict[int, Tensor] = {}
    our_experts: dict[int, Tensor] = {}
    hooks = []
    for i, layer in enumerate(theirs.model.layers):
        hooks.append(layer.register_forward_hook(_keep_stream(their_layers, i)))
        for name, module in layer.named_modules():
            if name.endswith(".experts"):
                hooks.append(module.register_forward_pre_hook(_keep_choice(their_experts, i), with_kwargs=True))
    for name, layer in ours.layers.items():
        hooks.append(layer.register_forward_hook(_keep_stream(our_layers, int(name))))
        for module in layer.modules():
            if isinstance(module, Gate):
                hooks.append(module.register_forward_hook(_keep_gate(our_experts, int(name))))
    try:
        logits_BSV = theirs(input_ids=ids_BS).logits
        assert ours.output is not None
        x_SBD = ours.hidden(None, whole_batch(ids_BS.T, ours.ctx))
        found_SBV = ours.output(x_SBD)[..., : logits_BSV.shape[-1]]
    finally:
        for hook in hooks:
            hook.remove()
    batch = ids_BS.shape[0]
    return ModelReport(
        logits=_error(found_SBV.transpose(0, 1), logits_BSV),
        layers=[_error(our_layers[i].transpose(0, 1), stream) for i, stream in sorted(their_layers.items())],
        routing={i: _agreement(our_experts[i], ids, batch) for i, ids in their_experts.items() if i in our_experts},
        tolerance=tolerance,
    )


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def _agreement(ours_TK: Tensor, theirs_TK: Tensor, batch: int) -> float:
    """Ours come position by position, theirs sequence by sequence."""
    ours_TK = ours_TK.unflatten(0, (-1, batch)).transpose(0, 1).flatten(0, 1)
    return float((ours_TK.sort(-1).values == theirs_TK.sort(-1).values).all(-1).double().mean())


def _keep_stream(kept: dict[int, Tensor], layer: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        kept[layer] = output[0] if isinstance(output, tuple) else output

    return hook


def _keep_choice(kept: dict[int, Tensor], layer: int) -> Callable[..., None]:
    """Experts of transformers 5 are called with the ids of the chosen ones, whatever the router."""

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        ids = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and not a.is_floating_point()]
        if ids:
            kept[layer] = ids[0].flatten(0, -2)

    return hook


def _keep_gate(kept: dict[int, Tensor], layer: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        kept[layer] = output[0].expert_ids_GTK.flatten(0, 1)

    return hook
