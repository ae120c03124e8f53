"""Megatron-style training of Mixture-of-Experts language models: any layout, the same curve."""

__version__ = "0.1.0"
