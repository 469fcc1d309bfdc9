"""Repair the training that ``byt5_overflow.py`` shows, without an edit of the model.

The model is healthy in float32. ``forecast`` says what would fail in float16, ``plan`` which
operations to keep in float32, and ``keep_float32`` keeps them there: the training goes on in
float16, with a finite loss.
"""

import copy

import torch
from byt5_overflow import make_model, text_batches

import fxguard


def train(model: torch.nn.Module, batches: torch.Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    losses = []
    for tokens in batches:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    model = make_model().train()
    batches = text_batches()
    print("float32:", *train(copy.deepcopy(model), batches))
    print("float16:", *train(copy.deepcopy(model).half(), batches))

    forecast = fxguard.forecast(model, input_ids=batches[0], labels=batches[0], loss="loss")
    print(forecast, end="\n\n")
    plan = forecast.plan()
    print(plan, end="\n\n")

    repaired = fxguard.keep_float32(model.half(), plan)
    print("repaired:", *train(repaired, batches))


if __name__ == "__main__":
    main()
