"""Conversion between Hugging Face folders and checkpoints of ours: a table per family, read in both directions."""
