"""What a model family is to conversion: its name, its configuration's parts, its tensors' rules."""

from dataclasses import dataclass

from megatron_moe.convert.fields import Part
from megatron_moe.convert.table import Rule

# Keys that do not change what a model computes from its tokens, only how it is trained or run. They are carried along.
NEUTRAL = frozenset(
    {
        "architectures",
        "model_type",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "auto_map",
        "_name_or_path",
        "name_or_path",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "initializer_range",
        "use_cache",
        "output_router_logits",
        "router_aux_loss_coef",
        "max_position_embeddings",
        "pretraining_tp",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "torchscript",
        "use_bfloat16",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "is_decoder",
        "add_cross_attention",
        "cross_attention_hidden_size",
        "problem_type",
        "id2label",
        "label2id",
        "use_return_dict",
        "attn_implementation",
        "experts_implementation",
        "_attn_implementation_autoset",
        "quantization_config",
        "expert_dropout",
        "tokenizer_class",
        "max_window_layers",
        "seq_aux",
        "aux_loss_alpha",
        "ep_size",
    }
)


@dataclass(frozen=True)
class Family:
    """One architecture of transformers.

    Attributes:
        model_type: of config.json.
        architecture: the class that transformers loads it with.
        parts: of the configuration.
        rules: of the tensors.
        ignored: regular expressions of names of theirs that hold nothing of their own, such as rotary tables.
        neutral: keys that change nothing in this family, beside :data:`NEUTRAL`.
        copies: (pattern of a name of theirs, of which it is a copy): read to be compared, written again.
        remote_code: transformers has no such class; the model comes with its own code.
    """

    model_type: str
    architecture: str
    parts: tuple[Part, ...]
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
    neutral: frozenset[str] = frozenset()
    copies: tuple[tuple[str, str], ...] = ()
    remote_code: bool = False
