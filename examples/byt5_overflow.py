"""Train a small ByT5 in float16, as an ordinary script that does not know fxguard.

``python examples/byt5_overflow.py`` prints that the loss is NaN, and no reason.
``fxguard run examples/byt5_overflow.py`` stops the script and names the multiplication that
overflowed.
"""

from pathlib import Path

import torch
from transformers import T5Config, T5ForConditionalGeneration

ROOT = Path(__file__).resolve().parent.parent
BATCHES, BATCH_SIZE, LENGTH = 3, 2, 128


def text_batches() -> torch.Tensor:
    """Text of this repository as ByT5 sees it, bytes + 3. Shape [batch, example, byte]."""
    files = [ROOT / "LICENSE", *sorted(ROOT.glob("*.md"))]
    text = b"".join(file.read_bytes() for file in files)
    tokens = torch.tensor(list(text[: BATCHES * BATCH_SIZE * LENGTH])) + 3
    return tokens.view(BATCHES, BATCH_SIZE, LENGTH)


def make_model() -> T5ForConditionalGeneration:
    config = T5Config(
        vocab_size=384,
        d_model=256,
        d_kv=32,
        d_ff=512,
        num_layers=4,
        num_heads=8,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
        initializer_factor=10.0,  # large weights: the feed-forward leaves float16's range
    )
    torch.manual_seed(0)
    return T5ForConditionalGeneration(config)


def main() -> None:
    model = make_model().half().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step, tokens in enumerate(text_batches()):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item()}")


if __name__ == "__main__":
    main()
