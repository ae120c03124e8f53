"""Rules of tensors that many families share, as functions of the prefix of a layer."""

from collections.abc import Callable

from megatron_moe.convert.table import HALVES, Rule, fused, one, pair, per_expert

ENDS = (
    Rule("embedding.weight", one("model.embed_tokens.weight")),
    Rule("output.norm.weight", one("model.norm.weight")),
    Rule("output.weight", one("lm_head.weight")),
)
OURS, THEIRS = "layers.{layer}.", "model.layers.{layer}."
MODULES = "mtp.{depth}.layer."
Part = Callable[[str, str], tuple[Rule, ...]]


def in_layers(*parts: Part) -> tuple[Rule, ...]:
    """The rules of parts of a layer."""
    return tuple(rule for part in parts for rule in part(OURS, THEIRS))


def in_layers_and_modules(*parts: Part) -> tuple[Rule, ...]:
    """The same, and those of the layers of multi-token-prediction modules, which theirs count on as further layers."""
    return in_layers(*parts) + tuple(rule for part in parts for rule in part(MODULES, THEIRS))


def norms(ours: str, theirs: str) -> tuple[Rule, ...]:
    """Before attention and before the feed-forward."""
    return (
        Rule(ours + "attention_norm.weight", one(theirs + "input_layernorm.weight")),
        Rule(ours + "feed_forward_norm.weight", one(theirs + "post_attention_layernorm.weight")),
    )


def grouped_attention(ours: str, theirs: str) -> tuple[Rule, ...]:
    """Grouped-query attention; biases, norms of queries and keys, and sinks where the model has them."""
    rules = []
    for short, long in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output")):
        for kind in ("weight", "bias"):
            rules.append(Rule(f"{ours}attention.{long}.{kind}", one(f"{theirs}self_attn.{short}_proj.{kind}")))
    for short, long in (("q", "query"), ("k", "key")):
        rules.append(Rule(f"{ours}attention.{long}_norm.weight", one(f"{theirs}self_attn.{short}_norm.weight")))
    return (*rules, Rule(f"{ours}attention.sinks", one(f"{theirs}self_attn.sinks")))


def latent_attention(ours: str, theirs: str) -> tuple[Rule, ...]:
    """Latent attention (DeepSeek); rows and rotary pairs are in the same order in both."""
    names = {
        "query": "q_proj",
        "query_down": "q_a_proj",
        "query_down_norm": "q_a_layernorm",
        "query_up": "q_b_proj",
        "kv_down": "kv_a_proj_with_mqa",
        "kv_down_norm": "kv_a_layernorm",
        "kv_up": "kv_b_proj",
        "output": "o_proj",
    }
    return tuple(Rule(f"{ours}attention.{o}.weight", one(f"{theirs}self_attn.{t}.weight")) for o, t in names.items())


def feed_forward(ours: str, theirs: str) -> tuple[Rule, ...]:
    """A dense layer."""
    return _gated(ours + "feed_forward.", theirs + "mlp.")


def _gated(ours: str, theirs: str) -> tuple[Rule, ...]:
    """A gated feed-forward: gate and up are one matrix of ours."""
    return (
        Rule(ours + "fc1.weight", pair(theirs + "gate_proj.weight", theirs + "up_proj.weight")),
        Rule(ours + "fc2.weight", one(theirs + "down_proj.weight")),
    )


def experts(ours: str, theirs: str) -> tuple[Rule, ...]:
    """Router and experts; experts one by one, or fused as transformers 5 has them in memory."""
    one_expert, all_experts = theirs + "mlp.experts.{expert}.", theirs + "mlp.experts."
    return (
        Rule(ours + "moe.gate.weight", one(theirs + "mlp.gate.weight")),
        Rule(
            ours + "moe.experts.fc1",
            per_expert(one_expert + "gate_proj.weight", one_expert + "up_proj.weight"),
            fused(all_experts + "gate_up_proj", HALVES),
        ),
        Rule(ours + "moe.experts.fc2", per_expert(one_expert + "down_proj.weight"), fused(all_experts + "down_proj")),
    )


def correction_bias(ours: str, theirs: str) -> tuple[Rule, ...]:
    """The bias of the choice (DeepSeek-V3)."""
    return (Rule(ours + "moe.gate.bias_E", one(theirs + "mlp.gate.e_score_correction_bias")),)


def shared_expert(name: str) -> Part:
    """The experts that see every token, as one feed-forward, which their files call ``name``."""
    return lambda ours, theirs: _gated(f"{ours}moe.shared_expert.feed_forward.", f"{theirs}mlp.{name}.")


def prediction_module() -> tuple[Rule, ...]:
    """What a multi-token-prediction module has beside its layer (DeepSeek-V3, GLM): it is stored as a further layer."""
    names = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj", "norm": "shared_head.norm"}
    return tuple(Rule(f"mtp.{{depth}}.{o}.weight", one(f"{THEIRS}{t}.weight")) for o, t in names.items())


PREDICTION_COPIES = (
    (THEIRS + "embed_tokens.weight", "embedding.weight"),
    (THEIRS + "shared_head.head.weight", "output.weight"),
)
"""What the file of a prediction module holds a second time: names of theirs, and of the tensors of ours."""
