"""A healthy script: a mask of -inf, a log that where discards, clipping, evaluation."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(16, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    tokens = torch.randint(1, 16, (2, 5))
    hidden = model[0](tokens)
    made = model[1](hidden, src_key_padding_mask=tokens == 3)
    scores = (made @ model[0].weight.T).masked_fill(torch.arange(16) == 0, float("-inf"))
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())
    loss = loss + torch.where(hidden > 0, hidden.clamp(min=1e-9).log(), 0.0).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
model.eval()
with torch.no_grad():
    print(model(torch.ones(1, 3, dtype=torch.long)).shape)
