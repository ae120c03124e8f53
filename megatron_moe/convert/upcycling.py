"""Upcycling: a dense model becomes a mixture of experts that begins with the same function.

Sparse upcycling (arXiv:2212.05055) copies each feed-forward into all experts. Granular upcycling (2410.07524) also
cuts it into G shards along its width; expert = copy * G + shard, and the shards of a copy share one row of the router:

    dense F: [ shard 0 | shard 1 ]   ->   experts  0: copy 0, shard 0    1: copy 0, shard 1    2: copy 1, shard 0    ...
    router:  one random row a copy   ->   rows     r_0                   r_0                   r_1                   ...

The best G scores of a token are then those of one copy, whole. With weights from a softmax over the chosen ones, which
sum to 1, K a multiple of G, and the second matrix times G, the function is preserved exactly.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_moe.checkpoint.streaming import Piece
from megatron_moe.checkpoint.tensor_files import Described
from megatron_moe.config.schema import Config
from megatron_moe.convert.errors import ConversionError
from megatron_moe.convert.importing import Import
from megatron_moe.convert.positions import pattern_text
from megatron_moe.convert.quantised import Source

SCALINGS = ("exact", "paper", "none")


@dataclass(frozen=True)
class Upcycling:
    """How a dense model is upcycled.

    Attributes:
        expansion: copies of each feed-forward (E).
        granularity: shards of a copy (G); experts are E G.
        topk: experts per token (T).
        pre_softmax: weights from a softmax over all experts; else over the chosen ones.
        scaling: exact: the second matrix times G; paper: both matrices, so that the expected output is that of the
            dense layer; none.
        layers: which layers become MoE.
        router_std: of the router's rows.
    """

    expansion: int
    granularity: int
    topk: int
    pre_softmax: bool
    scaling: str
    layers: tuple[bool, ...]
    router_std: float
    seed: int

    @property
    def preserves_function(self) -> bool:
        """Whether the mixture computes what the dense model did."""
        return self.scaling == "exact" and not self.pre_softmax and self.topk % self.granularity == 0


def paper_scale(expansion: int, granularity: int, topk: int, *, pre_softmax: bool, gated: bool) -> float:
    """Factor of each matrix, arXiv:2410.07524 section 3.3 and its code: a cube root where the layer is of third order.

    A softmax over all E G experts gives each of T chosen ones about 1 / (E G) of the output of one of G shards: the
    output shrinks to T / (E G^2). Over the chosen ones alone it shrinks to 1 / G.
    """
    shrinkage = expansion * granularity**2 / topk if pre_softmax else float(granularity)
    return shrinkage ** (1 / 3 if gated else 1 / 2)


def shard(tensor: Tensor, dim: int, granularity: int, index: int) -> Tensor:
    """One of the equal parts along the feed-forward's width."""
    return tensor.tensor_split(granularity, dim)[index]


def moe_config(config: Config, how: Upcycling) -> Config:
    """The configuration of the mixture.

    Raises:
        ConversionError: the model is not dense, has biases, or a width that cannot be cut; the promise cannot hold.
    """
    model = config.model
    if config.moe.num_experts is not None:
        raise ConversionError("the model is a mixture of experts already; upcycling begins from a dense one.")
    if model.add_bias_linear:
        raise ConversionError("the feed-forward layers have biases (--add-bias-linear), which upcycling does not cut.")
    if model.dense_ffn_size % how.granularity:
        raise ConversionError(f"--granularity {how.granularity} does not divide the width {model.dense_ffn_size}.")
    if not 1 <= how.topk <= how.expansion * how.granularity:
        raise ConversionError(
            f"--topk {how.topk} is not between 1 and the {how.expansion * how.granularity} experts of --expansion "
            f"{how.expansion} x --granularity {how.granularity}."
        )
    if how.scaling == "exact" and not how.preserves_function:
        raise ConversionError(
            f"--scaling exact preserves the function only without --pre-softmax and with --topk {how.topk} a multiple "
            f"of --granularity {how.granularity}; give --scaling paper or none."
        )
    moe = replace(
        config.moe,
        num_experts=how.expansion * how.granularity,
        moe_ffn_hidden_size=model.dense_ffn_size // how.granularity,
        moe_layer_freq=pattern_text(how.layers),
        moe_router_topk=how.topk,
        moe_router_pre_softmax=how.pre_softmax,
        moe_router_init_std=how.router_std,
    )
    return replace(config, model=replace(model, ffn_hidden_size=model.dense_ffn_size), moe=moe)


def upcycled_pieces(
    dense: Source, config: Config, tensors: Mapping[str, Described], how: Upcycling
) -> Iterator[tuple[Piece, Tensor]]:
    """The pieces of the mixture's checkpoint in the order of its tensors.

    Args:
        dense: the dense model by our names.
        config: of the mixture.
        tensors: of the mixture; wide types first.
    """
    scale = _scales(config, how)
    for name, described in tensors.items():
        layer, _, part = name.partition(".moe.")
        if part == "gate.weight":
            rows = _router_rows(name, how, described)
            yield Piece(name), rows.repeat_interleave(how.granularity, 0)
        elif part in ("experts.fc1", "experts.fc2"):
            kind = part.removeprefix("experts.")
            whole = dense.read(f"{layer}.feed_forward.{kind}.weight")
            for row in range(described.shape[0]):
                piece = shard(whole, 1, how.granularity, row % how.granularity) * scale[kind]
                yield Piece(name, row), piece.to(described.dtype)
        else:
            yield Piece(name), dense.read(name).to(described.dtype)


def _scales(config: Config, how: Upcycling) -> dict[str, float]:
    if how.scaling == "exact":
        return {"fc1": 1.0, "fc2": float(how.granularity)}
    if how.scaling == "none":
        return {"fc1": 1.0, "fc2": 1.0}
    third_order = config.model.gated or config.model.activation == "squared_relu"
    factor = paper_scale(how.expansion, how.granularity, how.topk, pre_softmax=how.pre_softmax, gated=third_order)
    return dict.fromkeys(("fc1", "fc2"), factor)


def _router_rows(name: str, how: Upcycling, described: Described) -> Tensor:
    """One random row a copy, a function of the seed and the layer."""
    seed = int.from_bytes(hashlib.sha256(f"{how.seed} {name}".encode()).digest()[:7], "big")
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(how.expansion, described.shape[1], generator=generator, dtype=torch.float64)
    return (rows * how.router_std).to(described.dtype)


class Imported:
    """A folder of theirs by our names, as an import would read it."""

    def __init__(self, made: Import) -> None:
        self._made, self.tensors = made, made.ours
        self._steps = {step.ours: step for step in made.plan.steps}

    def read(self, name: str, row: int | None = None) -> Tensor:
        """A tensor, or one row of it (index into dim 0), as it is stored there."""
        step = self._steps[Piece(name, row)]
        return step.operation.to_ours([self._made.source.read(piece.name, piece.row) for piece in step.theirs])
