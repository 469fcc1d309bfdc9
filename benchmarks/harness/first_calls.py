"""What is called for the first time: models of several libraries, small, and what is run of them.

The models are narrow, so that capturing one takes longer than computing it. Each imports its own
package, named in :data:`CASES`.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness.models import MLP, MODELS, SHAPES, VOCABULARY, byte_ids

__all__ = ["CASES", "Case", "FirstCall"]

LAYERS = 24


@dataclass(frozen=True, slots=True)
class FirstCall:
    """A model, and what is run of it.

    Attributes:
        model: what is captured.
        run: what the script does with the model.
    """

    model: nn.Module
    run: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """One first call.

    Attributes:
        make: makes it, for a size of the models in :data:`harness.models.SHAPES`.
        package: what has to be installed.
    """

    make: Callable[[str], FirstCall]
    package: str = "torch"


def forward(model: nn.Module, *args: Any, **kwargs: Any) -> FirstCall:
    """One forward in evaluation, without gradients."""

    def run() -> object:
        with torch.no_grad():
            return model(*args, **kwargs)

    return FirstCall(model.eval(), run)


def of_harness(name: str, size: str) -> FirstCall:
    """A model that the other benchmarks measure, too."""
    model, inputs = MODELS[name].build(SHAPES[size][name], torch.float32, "cpu")
    return forward(model, **inputs)


class Block(nn.Module):
    """A block of N-BEATS (Oreshkin et al., 2020), generic basis."""

    def __init__(self, width: int, past: int, future: int) -> None:
        super().__init__()
        sizes = [past, *[width] * 4]
        layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(sizes)]
        self.layers = nn.Sequential(*(layer for pair in layers for layer in pair))
        self.backcast = nn.Linear(width, past)
        self.forecast = nn.Linear(width, future)

    def forward(self, past: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.layers(past)
        return self.backcast(hidden), self.forecast(hidden)


class NBeats(nn.Module):
    """N-BEATS: each block explains a part of a series, and hands on the rest."""

    def __init__(
        self, blocks: int = 30, width: int = 256, past: int = 60, future: int = 12
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, past, future) for _ in range(blocks))
        self.future = future

    def forward(self, past: Tensor) -> Tensor:
        forecast = past.new_zeros(past.shape[0], self.future)
        for block in self.blocks:
            explained, found = block(past)
            past = past - explained
            forecast = forecast + found
        return forecast


class Layer(nn.Module):
    """A layer of a GPT, as scripts write it themselves."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (batch, length, self.heads, width // self.heads)
        qkv = self.qkv(self.before_attention(x)).split(width, dim=2)
        query, key, value = (each.view(heads).transpose(1, 2) for each in qkv)
        scores = query @ key.transpose(-2, -1) * (width // self.heads) ** -0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        attention = scores.masked_fill(future, float("-inf")).softmax(-1)
        mixed = (attention @ value).transpose(1, 2).reshape(x.shape)
        x = x + self.projection(mixed)
        return x + self.mlp(self.before_mlp(x))


class Gpt(nn.Module):
    """A GPT whose layers are equal."""

    def __init__(self, layers: int, width: int = 64, length: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def own_gpt(layers: int, size: str) -> FirstCall:
    """A GPT of one's own."""
    return forward(Gpt(layers), byte_ids(2, 32))


def cs3darknet(size: str) -> FirstCall:
    """A convolutional network of timm."""
    import timm

    return forward(timm.create_model("cs3darknet_m"), torch.randn(1, 3, 64, 64))


def flux(size: str) -> FirstCall:
    """The transformer of Flux, small: 2 double and 4 single blocks."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    inputs = {
        "hidden_states": torch.randn(1, 16, 16),
        "encoder_hidden_states": torch.randn(1, 8, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.ones(1),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
        "guidance": None,
    }
    return forward(model, **inputs)


def gpt2(layers: int, *, use_cache: bool) -> nn.Module:
    """GPT-2 of transformers, narrow."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=128,
        n_embd=64,
        n_layer=layers,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        use_cache=use_cache,
    )
    return GPT2LMHeadModel(config)


def deep_gpt2(use_cache: bool, size: str) -> FirstCall:
    """GPT-2 as deep as its medium size."""
    return forward(gpt2(LAYERS, use_cache=use_cache), byte_ids(2, 32))


def llama(layers: int) -> nn.Module:
    """Llama of transformers, narrow."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def t5(layers: int = 2) -> nn.Module:
    """T5 of transformers, narrow."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=layers,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def generation(make: Callable[[], nn.Module], size: str) -> FirstCall:
    """Sixteen tokens, one after the other, with a cache that grows."""
    model: Any = make().eval()
    ids = byte_ids(2, 12)

    def run() -> object:
        return model.generate(ids, max_new_tokens=16, min_new_tokens=16, do_sample=False)

    return FirstCall(model, run)


def t5_trainer(size: str) -> FirstCall:
    """Four steps of transformers' Trainer, with an evaluation that generates after two."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    model = t5()
    ids = byte_ids(16, 24)
    examples: Any = [{"input_ids": row, "labels": row[:12]} for row in ids]
    settings = Seq2SeqTrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=4,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        eval_strategy="steps",
        eval_steps=2,
        predict_with_generate=True,
        generation_max_length=16,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Seq2SeqTrainer(
        model=model,
        args=settings,
        train_dataset=examples[:8],
        eval_dataset=examples[8:12],
        compute_metrics=lambda predicted: {},  # without it nothing is generated
    )
    return FirstCall(model, trainer.train)


def x_transformers(size: str) -> FirstCall:
    """A decoder of x-transformers, which rearranges tensors with einops."""
    import x_transformers

    decoder = x_transformers.Decoder(dim=64, depth=6, heads=4, rotary_pos_emb=True)
    model = x_transformers.TransformerWrapper(
        num_tokens=VOCABULARY, max_seq_len=64, attn_layers=decoder
    )
    return forward(model, byte_ids(2, 32))


def keras_cnn() -> Any:
    """A small convolutional network of Keras."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def keras_forward(size: str) -> FirstCall:
    """One call."""
    return forward(keras_cnn(), torch.randn(8, 28, 28, 1))


def keras_fit(size: str) -> FirstCall:
    """An epoch of four batches, and an evaluation."""
    import numpy

    model = keras_cnn()
    model.compile(loss="sparse_categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
    draws = numpy.random.default_rng(0)
    images = draws.random((32, 28, 28, 1), dtype="float32")
    classes = draws.integers(0, 10, 32)

    def run() -> object:
        return model.fit(
            images, classes, batch_size=8, verbose=0, validation_data=(images, classes)
        )

    return FirstCall(model, run)


def graph_network(kind: str, size: str) -> FirstCall:
    """A graph network of PyG: three layers, on a random graph."""
    import torch_geometric.nn.models as models

    nodes, edges = 50, 200
    more = {"deg": torch.ones(5), "aggregators": ["mean", "max"], "scalers": ["identity"]}
    model = getattr(models, kind)(16, 32, 3, out_channels=4, **(more if kind == "PNA" else {}))
    return forward(model, torch.randn(nodes, 16), torch.randint(nodes, (2, edges)))


# Variants of peft: the class of the configuration, and what it needs to be told.
PEFT: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 4}),
    "dora": ("LoraConfig", {"r": 4, "use_dora": True}),
    "adalora": ("AdaLoraConfig", {"total_step": 10}),
    "ia3": ("IA3Config", {}),
    "loha": ("LoHaConfig", {"r": 4, "target_modules": ["q_proj", "v_proj"]}),
    "lokr": ("LoKrConfig", {"r": 4, "target_modules": ["q_proj", "v_proj"]}),
    "oft": ("OFTConfig", {"oft_block_size": 4, "target_modules": ["q_proj", "v_proj"]}),
    "boft": ("BOFTConfig", {"boft_block_size": 4, "target_modules": ["q_proj", "v_proj"]}),
    "vera": ("VeraConfig", {"r": 4, "target_modules": ["q_proj", "o_proj"]}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
    "ptuning": ("PromptEncoderConfig", {"num_virtual_tokens": 4, "encoder_hidden_size": 32}),
}


def of_peft(variant: str, size: str) -> FirstCall:
    """A step of a Llama with an adapter: forward and backward."""
    import peft

    kind, options = PEFT[variant]
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(llama(2), config).train()
    if variant == "adalora":
        model = model.float()
    ids = byte_ids(2, 32)
    return FirstCall(model, lambda: model(input_ids=ids, labels=ids).loss.backward())


def cases() -> Iterator[tuple[str, Case]]:
    """All first calls, by name."""
    for name in MODELS:
        if name != MLP:
            yield name, Case(partial(of_harness, name), "transformers")
    yield "nbeats", Case(lambda size: forward(NBeats(), torch.randn(8, 60)))
    yield "cs3darknet", Case(cs3darknet, "timm")
    yield "flux", Case(flux, "diffusers")
    for layers in (LAYERS, 2 * LAYERS):
        yield f"gpt-{layers}", Case(partial(own_gpt, layers))
    yield "gpt2-24", Case(partial(deep_gpt2, False), "transformers")
    yield "gpt2-24-cache", Case(partial(deep_gpt2, True), "transformers")
    yield "x-transformers", Case(x_transformers, "x_transformers")
    yield "keras-forward", Case(keras_forward, "keras")
    yield "keras-fit", Case(keras_fit, "keras")
    yield (
        "generate-gpt2",
        Case(partial(generation, partial(gpt2, 4, use_cache=True)), "transformers"),
    )
    yield "generate-llama", Case(partial(generation, partial(llama, 4)), "transformers")
    yield "generate-t5", Case(partial(generation, t5), "transformers")
    yield (
        "generate-t5-24",
        Case(partial(generation, partial(t5, LAYERS // 2)), "transformers"),
    )
    yield "t5-trainer", Case(t5_trainer, "accelerate")
    for kind in ("GCN", "GraphSAGE", "GAT", "GIN", "PNA"):
        yield f"pyg-{kind.lower()}", Case(partial(graph_network, kind), "torch_geometric")
    for variant in PEFT:
        yield f"peft-{variant}", Case(partial(of_peft, variant), "peft")


CASES: dict[str, Case] = dict(cases())
