"""Small models of many architectures with random weights, and inputs for each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from support.needs import needs

TEXT = Path(__file__).resolve().parents[2].joinpath("LICENSE").read_bytes()


def byte_ids(batch: int = 2, length: int = 12, offset: int = 3) -> Tensor:
    """Real text as byte ids, ByT5's vocabulary: no tokenizer file is needed."""
    rows = [TEXT[i * length : (i + 1) * length] for i in range(batch)]
    return torch.tensor([[byte + offset for byte in row] for row in rows])


def padding_mask(ids: Tensor) -> Tensor:
    """A mask that hides the last quarter of every row but the first."""
    mask = torch.ones_like(ids)
    mask[1:, -ids.shape[1] // 4 :] = 0
    return mask


@dataclass(frozen=True)
class Entry:
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.dtype, bool], tuple[tuple[Any, ...], dict[str, Any]]]
    has_mask: bool = False

    def model(self, dtype: torch.dtype = torch.float32, train: bool = False) -> nn.Module:
        torch.manual_seed(0)
        return self.build().to(dtype).train(train)

    def on(self, device: torch.device) -> Entry:
        """The same model, with the same numbers, and its inputs on a device."""
        build, inputs = self.build, self.inputs
        return dataclasses.replace(
            self,
            build=lambda: build().to(device),
            inputs=lambda dtype, masked: moved(inputs(dtype, masked), device),
        )


ZOO: dict[str, Entry] = {}


def entry(name: str, inputs: Any, has_mask: bool = False) -> Callable[[Any], Any]:
    def add(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        ZOO[name] = Entry(name, build, inputs, has_mask)
        return build

    return add


def text(key: str = "input_ids", labels: bool = True) -> Any:
    def inputs(dtype: torch.dtype, masked: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = byte_ids()
        batch = {key: ids}
        if labels:
            batch["labels"] = ids
        if masked:
            batch["attention_mask"] = padding_mask(ids)
        return (), batch

    return inputs


def numbers(*shape: int) -> Any:
    def inputs(dtype: torch.dtype, masked: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype),), {}

    return inputs


# Models of transformers: the class, its inputs, whether those have a mask, the configuration.


def image_inputs(dtype: torch.dtype, masked: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    return (), {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


def whisper_inputs(dtype: torch.dtype, masked: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    features = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    ids = byte_ids()
    batch = {"input_features": features, "labels": ids}
    if masked:
        batch["decoder_attention_mask"] = padding_mask(ids)
    return (), batch


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
OF_TEXT = {**SIZES, "vocab_size": 384, "max_position_embeddings": 64}
OF_T5 = {
    "vocab_size": 384,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "use_cache": False,
}
OF_GPT2 = {
    "vocab_size": 384,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OF_LLAMA = {**OF_TEXT, "num_key_value_heads": 2, "pad_token_id": 0}
OF_MIXTRAL = {
    **OF_TEXT,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    # The default, grouped_mm, is one that TorchDynamo cannot trace in float32: see
    # tests/capture/test_plain_python.py.
    "experts_implementation": "batched_mm",
}
OF_VIT = {**SIZES, "image_size": 32, "patch_size": 8}
OF_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2]}
OF_WHISPER = {
    "vocab_size": 384,
    "num_mel_bins": 8,
    "d_model": 32,
    "max_source_positions": 16,
    "max_target_positions": 64,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
TRANSFORMERS: dict[str, tuple[str, Any, bool, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", text(), True, OF_T5),
    "llama": ("LlamaForCausalLM", text(), True, OF_LLAMA),
    "gpt2": ("GPT2LMHeadModel", text(), True, OF_GPT2),
    "bert": ("BertForMaskedLM", text(), True, OF_TEXT),
    "mixtral": ("MixtralForCausalLM", text(), True, OF_MIXTRAL),
    "vit": ("ViTForImageClassification", image_inputs, False, OF_VIT),
    "resnet": ("ResNetForImageClassification", image_inputs, False, OF_RESNET),
    "whisper": ("WhisperForConditionalGeneration", whisper_inputs, True, OF_WHISPER),
}


def of_transformers(name: str) -> nn.Module:
    transformers = needs("transformers")
    model_class, *_, config = TRANSFORMERS[name]
    made = getattr(transformers, model_class)
    return made(made.config_class(**config))


for _name, (_, _inputs, _has_mask, _) in TRANSFORMERS.items():
    ZOO[_name] = Entry(_name, functools.partial(of_transformers, _name), _inputs, _has_mask)


# plain torch


@entry("cnn", numbers(2, 3, 8, 8))
class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1))


@entry("lstm", numbers(2, 5, 8))
class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.lstm = nn.LSTM(8, 6, num_layers=2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden, (last, _) = self.lstm(torch.tanh(self.before(x)))
        return self.head(self.norm(hidden) * 2 + last[-1].unsqueeze(1))


def causal_inputs(dtype: torch.dtype, masked: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (x,), _ = numbers(2, 6, 16)(dtype, masked)
    mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=dtype)
    batch = {"mask": mask}
    if masked:
        batch["padding"] = torch.zeros(2, 6, dtype=dtype)
        batch["padding"][1, -2:] = -torch.inf
    return (x,), batch


@entry("encoder", causal_inputs, has_mask=True)
class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, mask: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(torch.relu(self.inner(x, mask=mask, src_key_padding_mask=padding)))


@entry("twice", numbers(3, 4))
class Twice(nn.Module):
    """A module that is called twice, and one whose weight is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.block[0].weight
        self.same = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.same(self.tied(self.block(self.block(x))))


@entry("in_place", numbers(3, 4))
class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        hidden.mul_(2).add_(1)
        hidden += x
        left = hidden[:, :2]
        left.mul_(0.5)
        hidden[:, 3] = 0.5
        return hidden.clamp_(max=3).masked_fill_(hidden > 2, 2.0) * 3


@dataclasses.dataclass
class Output:
    logits: Tensor
    extra: dict[str, Any]


@entry("containers", lambda dtype, masked: ((numbers(3, 4)(dtype, masked)[0][0],), {"scale": 2.0}))
class Containers(nn.Module):
    """Tuple, dictionary and dataclass outputs, keyword inputs, None."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()
        self.named = Named()

    def forward(self, x: Tensor, scale: float = 1.0, unused: Tensor | None = None) -> Output:
        left, (right, nothing) = self.pair(x, scale=scale)
        named = self.named(left=left, right=right, nothing=nothing)
        return Output(logits=named["sum"] * scale, extra={"pair": [left, right], "none": None})


class Pair(nn.Module):
    def forward(self, x: Tensor, scale: float) -> Any:
        return x * scale, (x.sin(), None)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, left: Tensor, right: Tensor, nothing: Any) -> Any:
        return {"sum": self.linear(left) + right, "text": "not a tensor"}


def moved(value: Any, device: torch.device) -> Any:
    """Nested inputs on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(moved(item, device) for item in value)
    return value


PLAIN = tuple(name for name in ZOO if name not in TRANSFORMERS)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor of a model's output, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def loss_of(output: Any) -> Tensor:
    """A scalar to differentiate: the model's loss, or the sum of its outputs."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    return sum(t.float().sum() for t in tensors_in(output) if t.is_floating_point())
