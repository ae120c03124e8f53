"""How copies of tokens reach their experts."""

from megatron_moe.moe.dispatchers.base import Dispatched, Dispatcher
from megatron_moe.moe.dispatchers.local import LocalDispatcher
from megatron_moe.moe.dispatchers.registry import DISPATCHERS, build_dispatcher

__all__ = ["DISPATCHERS", "Dispatched", "Dispatcher", "LocalDispatcher", "build_dispatcher"]
