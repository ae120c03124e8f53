"""Who writes and reads what: entries as items of ``torch.distributed.checkpoint``, which does the resharding.

    save   boxes that are this rank's to write -> WriteItems;
           the coordinator proves that they fill every tensor once
    load   boxes that this rank holds -> ReadItems from the stored chunks that they meet (torch's algorithm);
           the coordinator first compares names, shapes and types of the whole model with the checkpoint

The state dict that torch's functions take stays empty: the planners have the entries.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_moe.checkpoint.entries import Box, Entry
from megatron_moe.checkpoint.errors import CheckpointError


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


class EntrySavePlanner(DefaultSavePlanner):
    """Plans the writing of entries; torch's planner checks that all plans together fill each tensor once."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.entries = entries
        self.boxes = {MetadataIndex(e.name, box.offsets): box for e in entries for box in e.written}

    def create_local_plan(self) -> SavePlan:
        """One item a box."""
        items = []
        for entry in self.entries:
            properties, size = TensorProperties(dtype=entry.dtype), torch.Size(entry.shape)
            for box in entry.written:
                data = TensorWriteData(_chunk(box), properties, size)
                items.append(WriteItem(MetadataIndex(entry.name, box.offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The view that an item is about."""
        return self.boxes[write_item.index].tensor.detach()


class EntryLoadPlanner(DefaultLoadPlanner):
    """Plans the reading of entries.

    Args:
        strict: a tensor that only the checkpoint or only the model has is an error. Another shape or type
            always is.
        prefix: only tensors of this part of the checkpoint count.
        where: the checkpoint, for messages.
    """

    metadata: Metadata

    def __init__(self, entries: Sequence[Entry], *, strict: bool, prefix: str, where: str) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.entries = [entry for entry in entries if entry.name.startswith(prefix)]
        self.boxes = {MetadataIndex(e.name, box.offsets): box for e in self.entries for box in e.held}
        self.strict, self.prefix, self.where = strict, prefix, where

    def create_local_plan(self) -> LoadPlan:
        """Reads for every box held, and the description of the entries for the coordinator."""
        items: list[ReadItem] = []
        described = {entry.name: (entry.shape, entry.dtype) for entry in self.entries}
        for entry in self.entries:
            stored = self.metadata.state_dict_metadata.get(entry.name)
            if not isinstance(stored, TensorStorageMetadata) or stored.size != entry.shape:
                continue  # the coordinator will tell
            reads = create_read_items_for_chunk_list(entry.name, stored, [_chunk(box) for box in entry.held])
            if sum(prod(read.lengths) for read in reads) != sum(prod(box.sizes) for box in entry.held):
                raise CheckpointError(
                    f"{self.where}: the index does not say where all of {entry.name} lies; it is damaged."
                )
            items += reads
        return LoadPlan(items, planner_data=described)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: compare the model of all ranks with the checkpoint.

        Raises:
            CheckpointError: listing all that does not fit.
        """
        wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for plan in global_plan:
            wanted |= plan.planner_data
        stored = {
            name: (tuple(tensor.size), tensor.properties.dtype)
            for name, tensor in self.metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata) and name.startswith(self.prefix)
        }
        problems = mismatches(stored, wanted, self.strict)
        if problems:
            raise CheckpointError(
                f"{self.where} does not fit this model:\n  "
                + "\n  ".join(problems)
                + "\nIts config.yaml says how it was trained; set the model's flags as there."
            )
        return [replace(plan, planner_data=None) for plan in global_plan]

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of a view that an item fills."""
        tensor = self.boxes[read_item.dest_index].tensor.detach()
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, offset, length)
        return tensor


Described = dict[str, tuple[tuple[int, ...], torch.dtype]]


def mismatches(stored: Described, wanted: Described, strict: bool) -> list[str]:
    """All differences between a checkpoint and a model, a line a kind or a tensor."""
    problems = []
    if strict:
        problems += _listed("missing in the checkpoint", sorted(wanted.keys() - stored.keys()))
        problems += _listed("left over in the checkpoint", sorted(stored.keys() - wanted.keys()))
    for name in sorted(wanted.keys() & stored.keys()):
        (old_shape, old_dtype), (shape, dtype) = stored[name], wanted[name]
        if old_shape != shape:
            problems.append(f"{name}: shape {list(old_shape)} in the checkpoint, {list(shape)} here")
        if old_dtype != dtype:
            problems.append(f"{name}: {old_dtype} in the checkpoint, {dtype} here".replace("torch.", ""))
    return problems


def _listed(what: str, names: list[str]) -> list[str]:
    return [f"{what}: {', '.join(names)}"] if names else []
