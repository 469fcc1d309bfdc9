"""What each rule keeps in float32, in how many runs, and whether float16 holds the rest.

    python benchmarks/precision_rules.py
    python benchmarks/precision_rules.py --models t5_wo rmsnorm_square

- ``forecast().plan()`` of fxguard.
- *above 512*: an operation is kept where a number that it reads or makes in float32 is larger than
  512, or a weight of it larger than 65504. That is the rule of ModelOpt's AutoCast for ONNX.
- *bisection*: all operations in float32 first; then the largest stretch that is left is put into
  float16. It stays there if the result is right within 1 %, else it is halved. That is the way of
  onnxconverter-common's ``auto_convert_mixed_precision``.

The other two are tools for ONNX. What is measured here are their rules, written anew for the graphs
that TorchDynamo captures, with fxguard's casts. The stories are those of docs/famous-nans.md that
float16 breaks in forward; the transformers models have random weights, of which some are scaled up.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Interpreter, Node

import fxguard
from fxguard.batch.events import GraphRun
from fxguard.capture.keeping import numbered
from fxguard.forecasting._examined import Examined
from fxguard.forecasting._graphs import Operation
from fxguard.forecasting._reference import reference_of
from fxguard.guard.guard import GuardedModel
from fxguard.guard.plugins import Plugins
from fxguard.options import Options
from fxguard.passes.unmark import without_marks
from fxguard.rerun.start import Start
from harness.quiet import quieten
from harness.tables import table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs"))
import famous_nans

__all__ = ["main"]

STORIES = (
    *("t5_wo", "gemma3_residual", "qk_before_scale", "rmsnorm_square", "flux_clip_hides"),
    *("mask_min_minus_score", "moe_residual_fp16", "rwkv_exp_half", "pool_clamp_eps", "focal_fp16"),
)
ABOVE, WEIGHT_ABOVE = 512.0, 65504.0
RIGHT = 0.01  # the largest error of a result that bisection takes

Built = tuple[nn.Module, tuple[Tensor, ...]]


def story(name: str) -> Built:
    """A story in float32."""
    found = famous_nans.part(name)
    model = found() if found.__code__.co_argcount == 0 else famous_nans.Forward(found)
    inputs = famous_nans.part(name, "_inputs")()
    return model.float(), tuple(x.float() if x.is_floating_point() else x for x in inputs)


def scaled(model: nn.Module, ending: str, factor: float) -> Built:
    """A model of transformers with large weights, as training makes them, and token numbers."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(ending):
                weight.mul_(factor)
    ids = torch.randint(3, 100, (2, 24), generator=torch.Generator().manual_seed(0))
    return model.eval(), (ids,)


def t5() -> Built:
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    sizes = {"d_model": 64, "d_ff": 256, "d_kv": 16, "num_layers": 4, "num_heads": 4}
    return scaled(T5EncoderModel(T5Config(**sizes, vocab_size=128)), "wo.weight", 3e4)


def llama() -> Built:
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, vocab_size=128)
    return scaled(LlamaModel(config), "down_proj.weight", 3e5)


def gpt2() -> Built:
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_layer=4, n_head=4, vocab_size=128, n_positions=64)
    return scaled(GPT2Model(config), "mlp.c_proj.weight", 1e6)


MODELS: dict[str, Callable[[], Built]] = {
    **{name: (lambda name=name: story(name)) for name in STORIES},  # type: ignore[misc]
    "T5 of transformers": t5,
    "Llama of transformers": llama,
    "GPT-2 of transformers": gpt2,
}


@dataclass(frozen=True, slots=True)
class Kept:
    """What a rule has come to."""

    operations: int
    runs: int
    error: float  # of the outputs

    def __str__(self) -> str:
        error = "not finite" if self.error == math.inf else f"{self.error:.1g}"
        return f"{self.operations} in {self.runs}: {error}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each model."""
    options = parser().parse_args(arguments)
    quieten()
    torch.set_num_threads(options.threads)
    rows = []
    for name in options.models:
        model, inputs = MODELS[name]()
        trials = Examined(model, inputs, {"use_cache": False} if " " in name else {}, torch.float16)
        found, _ = trials.forecast()
        reference_of(trials, draws=found.draws)
        order = list(found.counted)
        rows.append(
            {
                "model": name,
                "operations": str(len(order)),
                "float16 alone": str(Kept(0, 1, trials.error(()).outputs)),
                "fxguard": str(by_plan(model, trials.given)),
                "above 512": str(by_range(model, trials, order)),
                "bisection": str(by_bisection(trials, order)),
            }
        )
        print(table(rows[-1:]), flush=True)
    print()
    print(table(rows))
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser("precision_rules.py")
    found.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    found.add_argument("--threads", type=int, default=1, help="of the CPU")
    return found


def by_plan(model: nn.Module, given: Any) -> Kept:
    """Fxguard's own."""
    args, kwargs = given
    plan = fxguard.forecast(model, *args, **kwargs).plan()
    return Kept(plan.kept, plan.runs, plan.error)


def glob_of(operation: Operation) -> str:
    """Names one operation, and no other."""
    return f"{operation.module}:{operation.kind}#{operation.number}"


class Largest(Interpreter):
    """Runs a graph, and notes the largest magnitude that each operation reads and makes."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.of_node: dict[str, float] = {}

    def run_node(self, node: Node) -> Any:
        result = super().run_node(node)
        self.of_node[node.name] = magnitude(result)
        return result

    def above(self, node: Node, limit: float = ABOVE) -> bool:
        """Whether an operation reads or makes more."""
        return any(self.of_node[each.name] > limit for each in (node, *node.all_input_nodes))


def magnitude(value: Any) -> float:
    """The largest finite magnitude in a result."""
    tensors = [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, Tensor)]
    floats = [x[x.isfinite()].abs() for x in tensors if x.is_floating_point()]
    return max((float(x.max()) for x in floats if x.numel()), default=0.0)


def by_range(model: nn.Module, trials: Examined, order: Sequence[Operation]) -> Kept:
    """Keep what reads or makes numbers above 512 in one run in float32."""
    kept: dict[Operation, None] = {}

    def hear(run: GraphRun, outputs: Any) -> None:
        graph = without_marks(run.graph_module)
        largest = Largest(graph)
        with torch.no_grad():
            largest.run(*Start(run).copies())
        nodes = {node.name: node for node in graph.graph.nodes}
        for step, number in numbered(run.plan):
            if largest.above(nodes[step.node]):
                kept[Operation(step.module, step.kind, number)] = None

    guard = GuardedModel(
        model, Options(on_detect=lambda _: None, backward=False), Plugins(hear=hear)
    )
    guard.install()
    args, kwargs = trials.given
    with torch.no_grad():
        model(*args, **kwargs)
    guard.uninstall()
    # The model in float16 may have other branches.
    globs = [glob_of(each) for each in kept if each in set(order)]
    return Kept(len(globs), 1, trials.error(globs).outputs)


def by_bisection(trials: Examined, order: Sequence[Operation]) -> Kept:
    """Put stretches of operations into float16, the largest first, and halve those that fail."""
    names = [glob_of(each) for each in order]
    low: set[str] = set()
    kept: set[str] = set()
    stretches = [names]
    runs = 1  # of all in float32
    while stretches:
        stretch = max(stretches, key=len)
        stretches.remove(stretch)
        tried = low | set(stretch)
        runs += 1
        if trials.error([name for name in names if name not in tried]).outputs <= RIGHT:
            low = tried
        elif len(stretch) == 1:
            kept |= set(stretch)
        else:
            half = len(stretch) // 2
            stretches += [stretch[:half], stretch[half:]]
    return Kept(len(kept), runs, trials.error([n for n in names if n in kept]).outputs)


if __name__ == "__main__":
    sys.exit(main())
