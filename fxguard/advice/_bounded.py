"""Arguments that are kept where an operation has a value: how that is written.

Knows nothing of torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fxguard.advice.case import Case
from fxguard.source.same_operand import same_operand_at

__all__ = ["BOUNDED", "BOUNDED_RUN", "likewise"]


def likewise(case: Case) -> Mapping[str, str]:
    """The other lines that apply the operation to the same expression."""
    source = case.around.step.source
    same = [] if source is None else same_operand_at(source, case.name)
    others = " and ".join(each.place for each in same)
    return {"likewise": f", and likewise at {others}" if others else ""}


# How to keep an argument inside its domain or away from a pole.
BOUNDED = {
    "acos": "acos({c.unbounded}.clamp(-1 + {c.near_one}, 1 - {c.near_one}))",
    "acosh": "acosh({c.x}.clamp(min=1 + {c.near_one}))",
    "asin": "asin({c.unbounded}.clamp(-1 + {c.near_one}, 1 - {c.near_one}))",
    "atanh": "atanh({c.x}.clamp(-1 + {c.near_one}, 1 - {c.near_one}))",
    "erfinv": "erfinv({c.x}.clamp(-1 + {c.near_one}, 1 - {c.near_one}))",
    "log": "log({c.x}.clamp(min={c.floor}))",
    "log10": "log10({c.x}.clamp(min={c.floor}))",
    "log1p": "log1p({c.x}.clamp(min=-1 + {c.near_one}))",
    "log2": "log2({c.x}.clamp(min={c.floor}))",
    "logit": "logit({c.bare}, eps={c.near_one})",
    "pow": "{c.x}.clamp(min={c.near_zero}) ** {c.other}",
    "rsqrt": "rsqrt({c.bare} + {c.near_zero})",
    "sqrt": "sqrt({c.x}.clamp(min={c.near_zero}))",
    "xlogy": "xlogy({c.other}, {c.x}.clamp(min={c.near_zero}))",
}
# The same for a run, with letters for the operands.
BOUNDED_RUN = {
    name: f"{'a ** b' if name == 'pow' else 'xlogy(b, a)' if name == 'xlogy' else f'{name}(a)'} -> "
    + re.sub(r"\{c\.(x|unbounded|bare)\}", "a", text).replace("{c.other}", "b")
    for name, text in BOUNDED.items()
}
