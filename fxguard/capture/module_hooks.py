"""Hooks on every module of the process, while a guarded forward runs or a loss is followed.

They are put into ``torch.nn.modules.module._global_forward_hooks`` and its companions. The public
function would use a new key at each call, and TorchDynamo would compile again for each key. Hooks
on the modules themselves would switch off the fused kernels of ``nn.TransformerEncoder``.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch.nn.modules.module as module_hooks
from torch.utils.hooks import RemovableHandle

from fxguard.batch import module_hooks as module_calls

__all__ = ["HOOK_ID", "OWN_HOOKS", "hear_of_modules", "with_module_hooks"]

# Keys that nobody else gets.
HOOK_ID = RemovableHandle(OrderedDict()).id
FOLLOWED_ID = RemovableHandle(OrderedDict()).id
OWN_HOOKS = frozenset([HOOK_ID, FOLLOWED_ID])

_lock = threading.Lock()
_users: set[object] = set()  # forwards that need the hooks now, in all threads
# Those that want to see modules outside guarded forwards; one of a thread may end with it.
_watchers: weakref.WeakSet[object] = weakref.WeakSet()


def with_module_hooks(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function, and let :mod:`fxguard.batch.module_hooks` see its modules begin and return.

    After an interrupt at the wrong moment, a ``with`` statement would leave the hooks behind.
    """
    user = object()
    try:
        with _lock:
            _users.add(user)
            module_hooks._global_forward_pre_hooks[HOOK_ID] = module_calls.before_module
            module_hooks._global_forward_hooks_with_kwargs[HOOK_ID] = True
            module_hooks._global_forward_hooks[HOOK_ID] = module_calls.after_module
        return function(*args, **kwargs)
    finally:
        try:
            _take_off(user)
        except BaseException:  # an interrupt came first
            _take_off(user)
            raise


def _take_off(user: object) -> None:
    with _lock:
        _users.discard(user)
        if not _users:
            module_hooks._global_forward_pre_hooks.pop(HOOK_ID, None)
            module_hooks._global_forward_hooks.pop(HOOK_ID, None)
            module_hooks._global_forward_hooks_with_kwargs.pop(HOOK_ID, None)


def hear_of_modules(
    watcher: object, before: Callable[..., Any] | None, after: Callable[..., Any] | None
) -> None:
    """Start or stop calling two functions before and after each module of the process.

    Args:
        watcher: the object that asks for it.
        before: called before a module runs; None to stop.
        after: called after a module has returned or raised; None to stop.
    """
    with _lock:
        if before is not None and after is not None:
            _watchers.add(watcher)
            module_hooks._global_forward_pre_hooks[FOLLOWED_ID] = before
            module_hooks._global_forward_hooks[FOLLOWED_ID] = after
            module_hooks._global_forward_hooks_always_called[FOLLOWED_ID] = True
            return
        _watchers.discard(watcher)
        if not _watchers:
            module_hooks._global_forward_pre_hooks.pop(FOLLOWED_ID, None)
            module_hooks._global_forward_hooks.pop(FOLLOWED_ID, None)
            module_hooks._global_forward_hooks_always_called.pop(FOLLOWED_ID, None)
