"""GPT checkpoints of Megatron-Core as named tensors, layer by layer, and the table of what each is here.

What a layer's tensor is called there depends on the version and on ``moe_layer_freq``; seen from here it has one name:

    decoder.layers.mlp.router.weight    [layers, E, D]     ->  decoder.layers.{0, 1, ...}.mlp.router.weight
    decoder.layers.3.mlp.router.weight  [E, D]                 as it is
    ...linear_qkv.weight  [G (n + 2) C, D], for each of G groups n query heads, a key head, a value head
                                                           ->  ...linear_qkv.weight:query, :key, :value
    embedding.word_embeddings.weight, output_layer.weight  ->  without the rows that pad the vocabulary

The norms before attention and experts are modules of their own or parts of the next linear layer (Transformer Engine);
gated matrices are one tensor [2 F, D], or two, ``_w`` and ``_v``; experts are one tensor [E, ...] or one by one.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from megatron_moe.checkpoint.tensor_files import Described
from megatron_moe.config.schema import Config
from megatron_moe.convert.errors import ConversionError
from megatron_moe.convert.family import Family
from megatron_moe.convert.table import HALVES, Operation, Rule, fused, meta, one, pair, per_expert
from megatron_moe.convert.torch_dist import TorchDistFolder

_IGNORED = (r"(chained_\d+\.)?optimizer\..*", r".*\.(local|global)_tokens_per_expert")  # the optimizer begins anew
_HOMOGENEOUS = re.compile(r"(decoder\.layers\.)(\D.*)")
_UNGATED = Operation(lambda theirs: theirs[0].unflatten(0, (1, -1)), lambda ours: [ours.flatten(0, 1)])
"""[F, ...] <-> [1, F, ...]."""


class MegatronTensors:
    """A checkpoint's tensors by the names that the table has.

    Args:
        config: of the model; how heads share key-value heads is written nowhere in the tensors.

    Raises:
        ConversionError: a projection that the configuration's heads do not fit.
    """

    def __init__(self, folder: TorchDistFolder, config: Config) -> None:
        self._folder, self._model = folder, config.model
        self._parts: dict[str, tuple[str, tuple[int, ...], Callable[[Tensor], Tensor] | None]] = {}
        self.tensors: dict[str, Described] = {}
        for stored, described in folder.tensors.items():
            for name, index in _layers(stored, described):
                for suffix, change in self._changes(name):
                    shape = described.shape[len(index) :]
                    if change is not None:
                        shape = self._changed_shape(change, stored, described, index)
                    self._parts[name + suffix] = stored, index, change
                    self.tensors[name + suffix] = Described(shape, described.dtype)

    def read(self, name: str, row: int | None = None) -> Tensor:
        """A tensor, or one row of it (index into dim 0)."""
        stored, index, change = self._parts[name]
        if change is None:
            return self._folder.read(stored, index if row is None else (*index, row))
        whole = change(self._folder.read(stored, index))
        return whole if row is None else whole[row]

    def _changes(self, name: str) -> list[tuple[str, Callable[[Tensor], Tensor] | None]]:
        """How a stored tensor is seen: (what is added to its name, what is done to it)."""
        if re.search(r"\.linear_qkv\.(weight|bias)$", name):
            return [(f":{part}", partial(self._heads, part=part)) for part in ("query", "key", "value")]
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            return [("", lambda padded_VD: padded_VD[: self._model.vocab_size])]
        return [("", None)]

    def _heads(self, qkv: Tensor, part: str) -> Tensor:
        groups = self._model.query_groups
        per_group = self._model.num_attention_heads // groups
        heads = qkv.unflatten(0, (groups, per_group + 2, self._model.head_channels))
        chosen = {"query": slice(per_group), "key": slice(per_group, per_group + 1), "value": slice(-1, None)}[part]
        return heads[:, chosen].flatten(0, 2)

    def _changed_shape(
        self, change: Callable[[Tensor], Tensor], stored: str, described: Described, index: tuple[int, ...]
    ) -> tuple[int, ...]:
        try:
            return tuple(change(meta(Described(described.shape[len(index) :], described.dtype), None)).shape)
        except RuntimeError as error:
            model = self._model
            raise ConversionError(
                f"{stored} {list(described.shape)} does not fit {model.num_attention_heads} heads of "
                f"{model.head_channels} channels in {model.query_groups} groups."
            ) from error


def _layers(stored: str, described: Described) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, index into the first dimensions) of each tensor that a stored one is."""
    found = _HOMOGENEOUS.fullmatch(stored)
    if found is None:
        yield stored, ()
        return
    for layer in range(described.shape[0]):
        yield f"{found[1]}{layer}.{found[2]}", (layer,)


def megatron_core(gated: bool, *, drop_predictions: bool = False) -> Family:
    """The table, as a family that is only read.

    Args:
        gated: whether feed-forward layers and experts have a gate.
        drop_predictions: leave multi-token-prediction modules out.
    """
    rules = [
        Rule("embedding.weight", one("embedding.word_embeddings.weight")),
        Rule("output.weight", one("output_layer.weight")),
        *_layer("layers.{layer}.", "decoder.layers.{layer}.", gated),
        *_layer("mtp.{depth}.layer.", "mtp.layers.{depth}.transformer_layer.", gated),
        Rule("mtp.{depth}.projection.weight", one("mtp.layers.{depth}.eh_proj.weight")),
    ]
    for kind in ("weight", "bias"):
        rules.append(Rule(f"output.norm.{kind}", one(f"decoder.final_layernorm.{kind}")))
        for ours, theirs in (("embedding_norm", "enorm"), ("hidden_norm", "hnorm"), ("norm", "final_layernorm")):
            rules.append(Rule(f"mtp.{{depth}}.{ours}.{kind}", one(f"mtp.layers.{{depth}}.{theirs}.{kind}")))
    ignored = (*_IGNORED, r"mtp\..*") if drop_predictions else _IGNORED
    return Family("megatron-core", "GPTModel", parts=(), rules=tuple(rules), ignored=ignored)


def _layer(ours: str, theirs: str, gated: bool) -> Iterator[Rule]:
    attention, mlp = theirs + "self_attention.", theirs + "mlp."
    for kind in ("weight", "bias"):
        yield Rule(
            f"{ours}attention_norm.{kind}",
            one(f"{theirs}input_layernorm.{kind}"),
            one(f"{attention}linear_qkv.layer_norm_{kind}"),
        )
        yield Rule(
            f"{ours}feed_forward_norm.{kind}",
            one(f"{theirs}pre_mlp_layernorm.{kind}"),
            one(f"{mlp}linear_fc1.layer_norm_{kind}"),
        )
        for part in ("query", "key", "value"):
            yield Rule(f"{ours}attention.{part}.{kind}", one(f"{attention}linear_qkv.{kind}:{part}"))
        yield Rule(f"{ours}attention.query_norm.{kind}", one(f"{attention}q_layernorm.{kind}"))
        yield Rule(f"{ours}attention.key_norm.{kind}", one(f"{attention}k_layernorm.{kind}"))
        yield Rule(f"{ours}attention.output.{kind}", one(f"{attention}linear_proj.{kind}"))
        yield from _feed_forward(f"{ours}feed_forward.", mlp, kind, gated)
        yield from _feed_forward(f"{ours}moe.shared_expert.feed_forward.", f"{mlp}shared_experts.", kind, gated)
        yield from _experts(f"{ours}moe.experts.", f"{mlp}experts.experts.", kind, gated)
    yield Rule(f"{ours}attention.sinks", one(f"{attention}core_attention.softmax_offset"))
    yield Rule(f"{ours}moe.shared_expert.gate_weight", one(f"{mlp}shared_experts.gate_weight"))
    for name, their_name in (("weight", "weight"), ("logit_bias", "bias"), ("bias_E", "expert_bias")):
        yield Rule(f"{ours}moe.gate.{name}", one(f"{mlp}router.{their_name}"))


def _feed_forward(ours: str, theirs: str, kind: str, gated: bool) -> Iterator[Rule]:
    fc1, halves = f"{theirs}linear_fc1.{kind}", f"{theirs}linear_fc1.{kind}_"
    forms = (one(fc1, HALVES), pair(halves + "w", halves + "v")) if gated else (one(fc1, _UNGATED),)
    yield Rule(f"{ours}fc1.{kind}", *forms)
    yield Rule(f"{ours}fc2.{kind}", one(f"{theirs}linear_fc2.{kind}"))


def _experts(ours: str, theirs: str, kind: str, gated: bool) -> Iterator[Rule]:
    suffix = "" if kind == "weight" else "_bias"
    each = f"{theirs}{{expert}}.linear_fc1.{kind}"
    by_expert = per_expert(each + "_w", each + "_v") if gated else per_expert(each, operation=_UNGATED)
    together = fused(f"{theirs}linear_fc1.{kind}", HALVES if gated else _UNGATED)
    yield Rule(f"{ours}fc1{suffix}", together, by_expert)
    fc2 = f"linear_fc2.{kind}"
    yield Rule(f"{ours}fc2{suffix}", fused(theirs + fc2), per_expert(f"{theirs}{{expert}}.{fc2}"))
