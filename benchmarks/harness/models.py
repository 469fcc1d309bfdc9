"""The models that are measured, and their inputs: random weights, real text, real sizes."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MLP", "MODELS", "SHAPES", "Inputs", "Model", "Shape", "with_own_code"]

TEXT = Path(__file__).resolve().parents[2].joinpath("LICENSE").read_bytes()
VOCABULARY = 384  # bytes, and room for special tokens, as in ByT5

Inputs = dict[str, Tensor]

MLP = "mlp"


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a model and its inputs are."""

    width: int  # of the hidden states; of ResNet's stem
    layers: int  # of T5 in its encoder, and as many in its decoder
    batch: int
    length: int  # of a text in bytes, or of an image's side in pixels


# "full" takes two CPU cores 0.1 to 0.4 s for a forward, "quick" a tenth of that, and "small"
# next to nothing: there a tool's fixed cost is all that shows. "gpu" keeps a GPU busy.
SHAPES: dict[str, dict[str, Shape]] = {
    "gpu": {
        "t5": Shape(width=768, layers=12, batch=8, length=512),
        "llama": Shape(width=1024, layers=12, batch=8, length=1024),
        "gpt2": Shape(width=768, layers=12, batch=8, length=1024),
        "vit": Shape(width=768, layers=12, batch=64, length=224),
        "resnet50": Shape(width=64, layers=16, batch=64, length=224),
        MLP: Shape(width=16, layers=3, batch=4, length=1),
    },
    "full": {
        "t5": Shape(width=512, layers=4, batch=4, length=128),
        "llama": Shape(width=512, layers=6, batch=4, length=128),
        "gpt2": Shape(width=512, layers=6, batch=4, length=128),
        "vit": Shape(width=384, layers=6, batch=4, length=224),
        "resnet50": Shape(width=64, layers=16, batch=4, length=160),
        MLP: Shape(width=16, layers=3, batch=4, length=1),
    },
    "quick": {
        "t5": Shape(width=512, layers=2, batch=2, length=64),
        "llama": Shape(width=512, layers=2, batch=2, length=64),
        "gpt2": Shape(width=512, layers=2, batch=2, length=64),
        "vit": Shape(width=384, layers=2, batch=2, length=224),
        "resnet50": Shape(width=64, layers=16, batch=2, length=96),
        MLP: Shape(width=16, layers=3, batch=4, length=1),
    },
    "small": {
        "t5": Shape(width=64, layers=1, batch=2, length=32),
        "llama": Shape(width=64, layers=2, batch=2, length=32),
        "gpt2": Shape(width=64, layers=2, batch=2, length=32),
        "vit": Shape(width=64, layers=2, batch=2, length=64),
        "resnet50": Shape(width=8, layers=16, batch=2, length=64),
        MLP: Shape(width=16, layers=3, batch=4, length=1),
    },
}
HEAD = 64  # width of one head of attention, where the model is wide enough


def byte_ids(batch: int, length: int) -> Tensor:
    """Real text as byte ids, [batch, length]: no tokenizer file is needed."""
    ids = [byte + 3 for byte in islice(cycle(TEXT), batch * length)]
    return torch.tensor(ids).view(batch, length)


def text(shape: Shape) -> Inputs:
    """A text that the model reads and is to predict."""
    ids = byte_ids(shape.batch, shape.length)
    return {"input_ids": ids, "labels": ids}


def images(shape: Shape) -> Inputs:
    """Images, [batch, 3, length, length], and their classes."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(shape.batch, 3, shape.length, shape.length, generator=generator)
    return {"pixel_values": pixels, "labels": torch.arange(shape.batch) % 2}


def t5(shape: Shape) -> nn.Module:
    """T5 1.1: gated GELU. Its masks and position buckets hold -inf on every healthy run."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=shape.width,
        d_kv=min(HEAD, shape.width // 2),
        d_ff=shape.width * 2,
        num_layers=shape.layers,
        num_heads=max(2, shape.width // HEAD),
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


def llama(shape: Shape) -> nn.Module:
    """Llama, with grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(2, shape.width // HEAD)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.width,
        intermediate_size=shape.width * 11 // 4,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=max(512, shape.length),
        pad_token_id=0,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def gpt2(shape: Shape) -> nn.Module:
    """GPT-2, with its dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=max(512, shape.length),
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=max(2, shape.width // HEAD),
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


# Said here, because the first call would write it into the configuration, and the second compile
# the model again.
ONE_CLASS: dict[str, Any] = {"problem_type": "single_label_classification"}


def vit(shape: Shape) -> nn.Module:
    """A vision transformer, between its tiny and its small size."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=max(2, shape.width // HEAD),
        intermediate_size=shape.width * 4,
        image_size=shape.length,
        patch_size=16,
        **ONE_CLASS,
    )
    return ViTForImageClassification(config)


def resnet50(shape: Shape) -> nn.Module:
    """ResNet-50: convolutions and batch norms."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=shape.width,
        hidden_sizes=[shape.width * factor for factor in (4, 8, 16, 32)],
        depths=[3, 4, 6, 3],
        layer_type="bottleneck",
        **ONE_CLASS,
    )
    return ResNetForImageClassification(config)


class TinyMlp(nn.Module):
    """Three linear layers of next to no work: what is left of a call is its fixed cost."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """From [batch, width] to [batch, width]."""
        hidden = torch.relu(self.second(torch.relu(self.first(x))))
        output: Tensor = self.third(hidden)
        return output


def rows(shape: Shape) -> Inputs:
    """Random numbers, [batch, width]."""
    return {"x": torch.randn(shape.batch, shape.width, generator=torch.Generator().manual_seed(1))}


@dataclass(frozen=True, slots=True)
class Model:
    """One architecture."""

    title: str
    make: Callable[[Shape], nn.Module]
    inputs: Callable[[Shape], Inputs]
    repeat: int = 1  # how many calls are timed together

    def build(self, shape: Shape, dtype: torch.dtype, device: str) -> tuple[nn.Module, Inputs]:
        """The model and its inputs, always with the same numbers."""
        torch.manual_seed(0)
        model = self.make(shape).to(device, dtype)
        inputs = {
            name: value.to(device, dtype if value.is_floating_point() else None)
            for name, value in self.inputs(shape).items()
        }
        return model, inputs


MODELS = {
    "t5": Model("T5", t5, text),
    "llama": Model("Llama", llama, text),
    "gpt2": Model("GPT-2", gpt2, text),
    "vit": Model("ViT", vit, images),
    "resnet50": Model("ResNet-50", resnet50, images),
    MLP: Model("tiny MLP", lambda shape: TinyMlp(shape.width), rows, repeat=100),
}


def with_own_code(model: nn.Module) -> nn.Module:
    """Give a model a forward of its own, and return it.

    TorchDynamo keeps what it compiled with the code of a function. Copies of a model share that
    code, and each call of one would first try what was compiled for the others.
    """
    original: Any = type(model).forward
    own = types.FunctionType(
        original.__code__.replace(),
        original.__globals__,
        original.__name__,
        original.__defaults__,
        original.__closure__,
    )
    own.__kwdefaults__ = original.__kwdefaults__
    own.__dict__.update(original.__dict__)
    own.__qualname__, own.__module__ = original.__qualname__, original.__module__
    model.__class__ = type(type(model).__name__, (type(model),), {"forward": own})
    return model
