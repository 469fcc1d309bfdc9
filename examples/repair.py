"""Repair the training of ``byt5_overflow.py``, without an edit of the model.

In float16 the loss is NaN, and fxguard names the operation. The model is healthy in float32:
``forecast`` says there what else would fail in float16, ``plan`` which operations to keep in
float32, and ``keep_float32`` keeps them there. The training goes on in float16.
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
        losses.append(round(loss.item(), 1))
    return losses


def main() -> None:
    torch.manual_seed(0)
    model, batches = make_model().train(), text_batches()[..., :24].contiguous()
    low = copy.deepcopy(model).half()
    try:
        with fxguard.watch(low, max_frames_to_save=1):
            train(low, batches)
    except fxguard.NonFiniteError as error:
        print("in float16:", str(error).splitlines()[0])

    batch = batches[0]
    model.eval()  # without dropout, runs are comparable
    forecast = fxguard.forecast(model, input_ids=batch, labels=batch, loss="loss")
    print(str(forecast).splitlines()[0])
    plan = forecast.plan()
    print(plan)

    model.train()
    repaired = fxguard.keep_float32(copy.deepcopy(model).half(), plan)
    print("losses in float32:", *train(model, batches))
    print("losses in float16, repaired:", *train(repaired, batches))


if __name__ == "__main__":
    main()
