"""Print every frame of batches 1 and 3 of a small CNN, then stop. Detection is off."""

import torch
from torch import nn

import fxguard


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, kernel_size=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * 3 * 3, 10),
    )
    fxguard.instrument(model, trace_batch_nums=[1, 3], abort_after_batch_num=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        while True:
            images, labels = torch.randn(8, 1, 8, 8), torch.randint(10, (8,))
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    except fxguard.BatchLimitReached as reached:
        print(f"stopped: {reached}")


if __name__ == "__main__":
    main()
