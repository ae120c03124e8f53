"""How copies of tokens reach their experts."""

from megatron_moe.moe.dispatchers.base import Dispatched, Dispatcher
from megatron_moe.moe.dispatchers.local import LocalDispatcher
from megatron_moe.moe.dispatchers.registry import DISPATCHERS, build_dispatcher
from megatron_moe.moe.dispatchers.replicated import ReplicatedDispatcher

__all__ = ["DISPATCHERS", "Dispatched", "Dispatcher", "LocalDispatcher", "ReplicatedDispatcher", "build_dispatcher"]
