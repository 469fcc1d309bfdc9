"""Train a small language model in float16, as a script that does not know fxguard.

``python examples/train.py`` prints that the loss is NaN from step 2 on, and no reason.
``fxguard run examples/train.py`` names the line, the cause and the fix.
"""

import torch
from torch import nn


class RMSNorm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-8)


def batches():
    for step in range(4):
        tokens = torch.randint(1, 100, (8, 16))
        if step == 2:
            tokens[5, 11:] = 0  # padding: the first sequence that is shorter than the others
        yield tokens


def main():
    torch.manual_seed(0)
    embedding = nn.Embedding(100, 64, padding_idx=0)
    model = nn.Sequential(embedding, RMSNorm(), nn.Linear(64, 100)).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, tokens in enumerate(batches()):
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
