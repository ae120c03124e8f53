"""From text to batches of training samples.

    text --preprocess--> PREFIX.bin/.idx/.json --GPTDataset--> samples --BlendedDataset--> sample i
         documents.py    indexed_dataset.py     gpt_dataset.py           blend.py         of the run
         tokenizer.py    indexed_builder.py     splits.py                                     |
         preprocess.py   sidecar.py             build.py (all three splits at once)           v
                                                              loader.py, sampler.py, batch.py: Batch

Nothing is imported here, so that preprocessing does not wait for PyTorch: import from the modules. The whole
story is told in ``docs/data.md``.
"""
