"""Calls what TorchDynamo has captured, and captures nothing.

``torch.compile`` prepares each call for a capture that may come: it reads settings, saves the
state of dispatching, and asks who else is tracing. A call whose code is there needs none of that.

The parts of TorchDynamo in use (present in torch 2.11 to 2.13; without one of them, all calls go
through ``torch.compile``):

- the variables ``callback``, ``fn`` and ``self`` of the function that ``torch.compile`` returns:
  what captures, the function that it captures, and the id under which its code is kept.
- ``set_eval_frame`` and ``set_eval_frame_isolate_recompiles_id``: switch it on and off here.
- ``_torchdynamo_orig_backend``: under which backend code is found. Its own
  ``fail_on_recompile`` refuses to capture in the same way.
- ``eval_frame._stance``: whether the user has told it to behave in another way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch._C._dynamo.eval_frame as switches
from torch._C._dynamo.eval_frame import _FrameAction as Action
from torch._C._dynamo.eval_frame import _FrameExecStrategy as Strategy
from torch._dynamo import eval_frame
from torch._dynamo.types import ConvertFrameReturn

from fxguard.torch_names import leave_func_levels

__all__ = ["NotCaptured", "captured_only"]

_set_eval_frame = switches.set_eval_frame
_set_id: Callable[[int], int] | None = getattr(
    switches, "set_eval_frame_isolate_recompiles_id", None
)


class NotCaptured(Exception):  # noqa: N818 - it reaches no user
    """TorchDynamo has no code for a call. Nothing of it has run."""


def captured_only(compiled: Callable[..., Any]) -> Callable[..., Any] | None:
    """A function that calls what ``torch.compile`` has captured, or raises :class:`NotCaptured`.

    It is for a thread in which nobody traces, compiles, or transforms what is done to tensors.

    Args:
        compiled: what ``torch.compile`` returned for a function.

    Returns:
        None where this version of torch keeps no such function.
    """
    found = inspect.getclosurevars(compiled).nonlocals
    callback, function, context = (found.get(name) for name in ("callback", "fn", "self"))
    code = getattr(function, "__code__", None)
    if not callable(callback) or function is None or code is None:
        return None
    own_id = getattr(context, "_isolate_recompiles_id", -1)
    if own_id != -1 and _set_id is None:
        return None

    def refuse(frame: Any, *_: Any) -> ConvertFrameReturn:
        if frame.f_code is code:
            raise NotCaptured
        return _IN_PYTHON

    refuse._torchdynamo_orig_backend = callback  # type: ignore[attr-defined]
    refusing: Any = refuse

    def call(*args: Any, **kwargs: Any) -> Any:
        if eval_frame._stance.stance != "default":
            raise NotCaptured
        before = -1 if _set_id is None else _set_id(own_id)
        try:
            _set_eval_frame(refusing)
            return function(*args, **kwargs)
        except BaseException:
            _set_eval_frame(None)
            leave_func_levels(0)  # a graph may have raised inside one
            raise
        finally:
            _set_eval_frame(None)
            if _set_id is not None:
                _set_id(before)

    return call


# What has no code runs in Python, this time.
_IN_PYTHON = ConvertFrameReturn(
    frame_exec_strategy=Strategy(Action.SKIP, Action.DEFAULT),
    apply_to_code=False,
)
