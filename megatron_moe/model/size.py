"""How large a model is: its logical tensors without their values, and the parameters that a token uses.

The model itself is built on the ``meta`` device, which holds no values: no second description has to be kept true.
"""

from dataclasses import dataclass, replace
from math import prod

from torch import dtype

from megatron_moe.config.schema import Config, ParallelConfig
from megatron_moe.model.decoder import EMBEDDING_NAME, Decoder
from megatron_moe.moe.experts import Experts
from megatron_moe.moe.gate import Gate
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.sharding import sharded_parameters

LogicalTensors = dict[str, tuple[tuple[int, ...], dtype]]


def logical_tensors(config: Config) -> LogicalTensors:
    """Shape and type of every weight and buffer that a checkpoint of the model holds, by logical name."""
    model = _without_values(config)
    found = {name: (p.spec.shape, p.dtype) for name, p in sharded_parameters(model).items()}
    for name, module in model.named_modules():
        if isinstance(module, Gate):
            for key, buffer in module.named_buffers():
                found[f"{name}.{key}"] = tuple(buffer.shape), buffer.dtype
    return found


@dataclass(frozen=True)
class Size:
    """Numbers of parameters.

    Attributes:
        total: of the model, without multi-token prediction; a tied embedding counts once.
        prediction: of multi-token-prediction modules.
        active: those that take part in computing one token.
        input_embedding: rows of a table, of which a token reads one; published "active" numbers often leave it out.
    """

    total: int
    prediction: int
    active: int
    input_embedding: int

    @property
    def active_without_embedding(self) -> int:
        """Active parameters without the input embedding (which, if tied, is the output layer too and stays)."""
        return self.active - self.input_embedding


def size(config: Config) -> Size:
    """Count the parameters of a model; of E routed experts a token uses K."""
    model = _without_values(config)
    experts = {id(p) for _, m in model.named_modules() if isinstance(m, Experts) for p in m.parameters()}
    total = prediction = 0
    active = 0.0
    for name, parameter in sharded_parameters(model).items():
        numel = prod(parameter.spec.shape)
        if name.startswith("mtp."):
            prediction += numel
            continue
        total += numel
        share = config.moe.moe_router_topk / parameter.spec.shape[0] if id(parameter) in experts else 1.0
        active += numel * share
    tied = not config.model.untie_embeddings_and_output_weights
    embedding = 0 if tied else prod(sharded_parameters(model)[EMBEDDING_NAME].spec.shape)
    return Size(total, prediction, round(active), embedding)


def _without_values(config: Config) -> Decoder:
    return Decoder(replace(config, parallel=ParallelConfig()), ParallelContext.single("meta"))
