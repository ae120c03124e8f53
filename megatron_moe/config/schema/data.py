"""Data: token files, tokenizer, packing."""

from dataclasses import dataclass

from megatron_moe.config.fields import flag


@dataclass(frozen=True)
class DataConfig:
    """Data: token files, tokenizer, packing."""

    data_path: tuple[str, ...] = flag(
        (), "Prefix of a .bin/.idx pair, or 'weight prefix weight prefix ...' for a blend; cut by --split."
    )
    train_data_path: tuple[str, ...] = flag((), "As --data-path, for training alone.")
    valid_data_path: tuple[str, ...] = flag((), "As --data-path, for validation alone.")
    test_data_path: tuple[str, ...] = flag((), "As --data-path, for the final test alone.")
    split: str = flag("969,30,1", "Shares of the documents of --data-path for training, validation and test.")
    seq_length: int = flag(256, "Tokens per sequence (S).")
    tokenizer_type: str = flag("ByteTokenizer", "Kind of tokenizer.", registry="tokenizers")
    tokenizer_model: str | None = flag(None, "File or folder of the tokenizer.")
    reset_position_ids: bool = flag(False, "Positions start anew at every document of a packed sequence.")
    reset_attention_mask: bool = flag(False, "Attention does not cross documents of a packed sequence.")
    eod_mask_loss: bool = flag(False, "No loss on the token that follows an end of document.")
    mock_data: bool = flag(False, "Random tokens with a learnable structure instead of files.")
    num_workers: int = flag(1, "Threads that prepare batches ahead; 0 prepares them in line.")
