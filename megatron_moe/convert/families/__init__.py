"""Families by the ``model_type`` of their config.json. A new one is a file here and a line below."""

from megatron_moe.convert.families.deepseek import DEEPSEEK, DEEPSEEK_V2, DEEPSEEK_V3
from megatron_moe.convert.families.dense import LLAMA, QWEN2, QWEN3
from megatron_moe.convert.families.glm4_moe import GLM4_MOE
from megatron_moe.convert.families.gpt_oss import GPT_OSS
from megatron_moe.convert.families.mixtral import MIXTRAL
from megatron_moe.convert.families.olmoe import OLMOE
from megatron_moe.convert.families.qwen import QWEN2_MOE, QWEN3_MOE

FAMILIES = {
    family.model_type: family
    for family in (
        MIXTRAL,
        QWEN2_MOE,
        QWEN3_MOE,
        OLMOE,
        DEEPSEEK,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        GLM4_MOE,
        GPT_OSS,
        LLAMA,
        QWEN2,
        QWEN3,
    )
}
