"""Train a small Llama in bfloat16, with every operation checked inside torch.compile."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fxguard

LICENSE = Path(__file__).resolve().parent.parent / "LICENSE"
BATCHES, BATCH_SIZE, LENGTH = 8, 4, 64


def main() -> None:
    config = LlamaConfig(
        vocab_size=256,  # one token for each byte
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    compiled = torch.compile(fxguard.instrument(model), backend="aot_eager")

    text = LICENSE.read_bytes()[: BATCHES * BATCH_SIZE * LENGTH]
    batches = torch.tensor(list(text)).view(BATCHES, BATCH_SIZE, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, tokens in enumerate(batches):
        loss = compiled(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")
    print(fxguard.guard_of(compiled).coverage())


if __name__ == "__main__":
    main()
