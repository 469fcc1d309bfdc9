"""Idioms with infinities that somebody wrote on purpose: masks, sentinels, starts of a maximum."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - everybody writes F
from torch import Tensor, nn

from support.twins import HALF, WIDE, Draw, Inputs, Twins

MASKS = Twins()
twin, sister, gone_wrong = MASKS.twin, MASKS.sister, MASKS.gone_wrong


def scores_and_mask(draw: Draw) -> tuple[Tensor, ...]:
    return draw.normal(3, 5), draw.hidden(3, 5)


def a_row_hidden(draw: Draw) -> tuple[Tensor, ...]:
    return draw.normal(3, 5), draw.row_hidden(3, 5)


def scores(*shape: int) -> Inputs:
    return lambda draw: (draw.normal(*shape),)


# Logits that leave the model.


@twin(scores_and_mask)
def masked_logits_returned(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(mask, -math.inf)


@sister("mul", dtypes=WIDE)
def masked_logits_that_overflow(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(mask, -math.inf) * 1e39


@twin(scores_and_mask)
def masked_logits_over_a_temperature(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(mask, -math.inf) / 0.7


@sister("div")
def a_temperature_of_zero(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(mask, -math.inf) / 0.0


@twin(scores_and_mask)
def log_probabilities_of_masked_logits(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(mask, -math.inf).log_softmax(-1)


gone_wrong("log_softmax", a_row_hidden)


@twin(lambda draw: (draw.normal(2, 4), draw.exact(3.0, 7.0)))
def beam_scores_with_a_length_penalty(x: Tensor, length: Tensor) -> tuple[Tensor, ...]:
    log_probabilities = x.log_softmax(-1)
    total = torch.full_like(x, -math.inf)
    total[:, 0] = 0.0  # all beams are alike at the first step
    best = ((total + log_probabilities) / length[:, None] ** 0.8).topk(3)
    return best.values, best.indices


gone_wrong("div", lambda draw: (draw.normal(2, 4), draw.exact(3.0, 0.0)))


@twin(scores(2, 8))
def top_k_sampling(logits: Tensor) -> tuple[Tensor, Tensor]:
    threshold = logits.topk(3).values[..., -1:]
    logits = logits.masked_fill(logits < threshold, -math.inf)
    return logits, torch.multinomial(logits.float().softmax(-1), 1)


@twin(scores(2, 8))
def nucleus_sampling(logits: Tensor) -> Tensor:
    ordered, order = logits.sort(descending=True)
    behind = ordered.softmax(-1).cumsum(-1) > 0.7
    behind = behind.roll(1, -1)
    behind[..., 0] = False
    dropped = behind.scatter(1, order, behind)
    logits[dropped] = -math.inf
    return logits.softmax(-1)


@sister("softmax")
def nucleus_that_drops_all(logits: Tensor) -> Tensor:
    logits[torch.ones_like(logits, dtype=torch.bool)] = -math.inf
    return logits.softmax(-1)


@twin(scores(2, 8))
def forbidden_and_forced_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    logits[:, [1, 4]] = -math.inf
    forced = torch.full_like(logits, -math.inf)
    forced[:, 2] = 0.0
    return logits, forced


@twin(scores(2, 6))
def kept_by_scatter(logits: Tensor) -> Tensor:
    kept = logits.topk(2)
    return torch.full_like(logits, -math.inf).scatter(-1, kept.indices, kept.values).softmax(-1)


@twin(scores_and_mask)
def best_of_the_masked(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    masked = torch.where(mask, -math.inf, x)
    return masked.argmax(-1), masked.argsort(-1)


@twin(scores(2, 5))
def pointer_network(logits: Tensor) -> Tensor:
    visited = torch.zeros_like(logits, dtype=torch.bool)
    chosen = []
    for _ in range(4):
        log_probabilities = logits.masked_fill(visited, -math.inf).log_softmax(-1)
        best = log_probabilities.argmax(-1, keepdim=True)
        chosen.append(log_probabilities.gather(-1, best))
        visited = visited.scatter(-1, best, True)
    return torch.cat(chosen, -1)


# Attention.


def queries(draw: Draw) -> tuple[Tensor, ...]:
    return draw.normal(2, 4, 8), draw.hidden(2, 4, 4)


def queries_and_a_hidden_row(draw: Draw) -> tuple[Tensor, ...]:
    return draw.normal(2, 4, 8), draw.row_hidden(2, 4, 4)


@twin(queries)
def attention_with_a_mask(x: Tensor, mask: Tensor) -> Tensor:
    weights = (x @ x.mT / 8**0.5).masked_fill(mask, -math.inf).softmax(-1)
    return weights @ x


gone_wrong("softmax", queries_and_a_hidden_row)


@twin(scores(2, 4, 8))
def causal_by_triu(x: Tensor) -> Tensor:
    mask = torch.triu(torch.full((4, 4), -math.inf, dtype=x.dtype), diagonal=1)
    return (x @ x.mT / 8**0.5 + mask).softmax(-1) @ x


@sister("mul")
def causal_by_zero_times_infinity(x: Tensor) -> Tensor:
    mask = torch.triu(torch.ones(4, 4, dtype=x.dtype), diagonal=1) * -math.inf
    return (x @ x.mT / 8**0.5 + mask).softmax(-1) @ x


class CausalBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT / 8**0.5 + self.mask).softmax(-1) @ x


twin(scores(2, 4, 8))(CausalBuffer)


@twin(scores(2, 4, 8))
def alibi(x: Tensor) -> Tensor:
    position = torch.arange(4)
    distance = (position[None, :] - position[:, None]).to(x.dtype)
    slopes = torch.tensor([0.5, 0.25], dtype=x.dtype)[:, None, None]
    bias = (slopes * distance).masked_fill(distance > 0, -math.inf)
    return (x @ x.mT + bias).softmax(-1) @ x


@twin(scores(2, 6, 8))
def sliding_window(x: Tensor) -> Tensor:
    position = torch.arange(6)
    distance = position[:, None] - position[None, :]
    outside = (distance < 0) | (distance >= 2)
    bias = torch.zeros(6, 6, dtype=x.dtype).masked_fill(outside, -math.inf)
    return (x @ x.mT + bias).softmax(-1) @ x


@twin(queries_and_a_hidden_row)
def attention_sink(x: Tensor, mask: Tensor) -> Tensor:
    scores = (x @ x.mT / 8**0.5).masked_fill(mask, -math.inf)
    sink = torch.zeros_like(scores[..., :1])
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ x


@twin(lambda draw: (-20 * draw.positive(2, 5), draw.hidden(2, 5)), dtypes=HALF)
def lowest_number_added_to_a_score(x: Tensor, mask: Tensor) -> Tensor:
    return (x + mask.to(x.dtype) * torch.finfo(x.dtype).min).softmax(-1)


@twin(lambda draw: (draw.of(-20.0, -30.0, -25.0), draw.exact(0.0, -65504.0, -65504.0)), dtypes=HALF)
def lowest_number_of_float16_added(x: Tensor, mask: Tensor) -> Tensor:
    return (x + mask).softmax(-1)


@twin(queries, holds_bad=False)
def fused_attention_with_a_boolean_mask(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, attn_mask=~mask)


@twin(queries_and_a_hidden_row)
def fused_attention_with_a_float_mask(x: Tensor, mask: Tensor) -> Tensor:
    bias = torch.zeros_like(mask, dtype=x.dtype).masked_fill(mask, -math.inf)
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], bias[:, None])


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        causal = nn.Transformer.generate_square_subsequent_mask(4, dtype=x.dtype)
        return self.attention(x, x, x, attn_mask=causal)[0]


twin(scores(2, 4, 8))(Heads)


@sister("softmax|multi_head_attention_forward")
class HeadsWithoutKeys(Heads):
    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x, attn_mask=torch.full((4, 4), -math.inf, dtype=x.dtype))[0]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Any:
        padding = torch.zeros(2, 4, dtype=x.dtype)
        padding[1, 2:] = -math.inf
        return self.encoder(x, src_key_padding_mask=padding)


twin(scores(2, 4, 8))(Encoder)


@twin(queries_and_a_hidden_row, dtypes=WIDE, holds_bad=False)
def lse_of_flex_attention(x: Tensor, mask: Tensor) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    def hide(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(mask[batch, q, k], -math.inf, score)

    x = x[:, None]
    return flex_attention(x, x, x, score_mod=hide, return_lse=True)


@twin(scores(2, 8))
def retention_decay(x: Tensor) -> Tensor:
    position = torch.arange(4, dtype=x.dtype)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    decay = torch.log(1 - 2.0 ** (-5 - torch.arange(2, dtype=x.dtype)))
    distance = torch.masked_fill(position[:, None] - position[None, :], ~mask, math.inf)
    weights = torch.nan_to_num(torch.exp(distance * decay[:, None, None]))
    return weights / weights.sum(-1, keepdim=True).sqrt() * x[:, :4, None].sum()


@twin(lambda draw: (-draw.positive(2, 5),))
def segment_sums_of_mamba(decay: Tensor) -> Tensor:
    total = decay.cumsum(-1)
    sums = total[..., :, None] - total[..., None, :]
    below = torch.ones(5, 5, dtype=torch.bool).tril()
    return torch.exp(sums.masked_fill(~below, -math.inf)) @ decay[..., None]


@twin(lambda draw: (draw.normal(3, 8),))
def experts_of_unchosen_groups(x: Tensor) -> Tensor:
    groups = x.view(3, 4, 2)
    best = groups.amax(-1).topk(2).indices
    unchosen = torch.ones(3, 4, dtype=torch.bool).scatter(1, best, False)
    router = groups.masked_fill(unchosen[..., None], -math.inf).view(3, 8)
    weights, experts = router.softmax(-1).topk(2)
    return weights / weights.sum(-1, keepdim=True) + experts


@sister("softmax")
def experts_of_no_group(x: Tensor) -> Tensor:
    router = x.view(3, 4, 2).masked_fill(x.view(3, 4, 2) < 100, -math.inf).view(3, 8)
    weights, experts = router.softmax(-1).topk(2)
    return weights / weights.sum(-1, keepdim=True) + experts


# Rows of -inf under logsumexp.


@twin(scores(4, 3))
def partition_function_of_a_crf(emissions: Tensor) -> Tensor:
    transitions = torch.zeros(3, 3, dtype=emissions.dtype)
    transitions[:, 0] = -math.inf  # nothing leads back to the start
    total = torch.full((3,), -math.inf, dtype=emissions.dtype)
    total[0] = 0.0
    for emission in emissions:
        total = torch.logsumexp(total[:, None] + transitions, 0) + emission
    return total.logsumexp(0)


@sister("logsumexp|sub|add")
def a_crf_that_shifts_by_its_maximum(emissions: Tensor) -> Tensor:
    transitions = torch.zeros(3, 3, dtype=emissions.dtype)
    transitions[:, 0] = -math.inf
    total = torch.full((3,), -math.inf, dtype=emissions.dtype)
    total[0] = 0.0
    for emission in emissions:
        paths = total[:, None] + transitions
        best = paths.amax(0)  # -inf for the start
        total = best + (paths - best).exp().sum(0).log() + emission
    return total.logsumexp(0)


@twin(scores(4, 5))
def alphas_of_ctc(x: Tensor) -> Tensor:
    log_probabilities = x.log_softmax(-1)
    alpha = torch.full((5,), -math.inf, dtype=x.dtype)
    alpha[:2] = log_probabilities[0, :2]
    nothing = alpha.new_full((1,), -math.inf)
    for now in log_probabilities[1:]:
        alpha = torch.logaddexp(alpha, torch.cat([nothing, alpha[:-1]])) + now
    return torch.logaddexp(alpha[-1], alpha[-2])


@twin(lambda draw: (draw.normal(4, 2, 5),), dtypes=WIDE)
def ctc_of_a_short_target(x: Tensor) -> Tensor:
    lengths = torch.full((2,), 4), torch.full((2,), 2)
    return F.ctc_loss(x.log_softmax(-1), torch.tensor([[1, 2], [3, 4]]), *lengths)


@sister("ctc_loss")
def ctc_of_a_long_target(x: Tensor) -> Tensor:
    lengths = torch.full((2,), 4), torch.full((2,), 4)
    return F.ctc_loss(x.log_softmax(-1), torch.tensor([[1, 1, 2, 2], [3, 3, 4, 4]]), *lengths)


@twin(lambda draw: (draw.normal(4, 2, 5),), dtypes=WIDE)
def ctc_with_zero_infinity(x: Tensor) -> Tensor:
    lengths = torch.full((2,), 4), torch.full((2,), 4)
    targets = torch.tensor([[1, 1, 2, 2], [3, 3, 4, 4]])
    return F.ctc_loss(x.log_softmax(-1), targets, *lengths, zero_infinity=True)


@twin(lambda draw: (draw.normal(3, 4), draw.normal(3, 4, 2)))
def ring_attention_by_sigmoid(scores: Tensor, values: Tensor) -> Tensor:
    hidden = torch.full_like(scores, -math.inf)  # the keys of this rank come later
    out = (scores.softmax(-1)[..., None] * values).sum(1)
    lse = scores.logsumexp(-1)
    other_out, other_lse = torch.zeros_like(out), hidden.logsumexp(-1)
    out = out - torch.sigmoid(other_lse - lse)[:, None] * (out - other_out)
    return torch.cat([out, (lse - F.logsigmoid(lse - other_lse))[:, None]], -1)


@sister("sub")
def ring_attention_without_any_key(scores: Tensor, values: Tensor) -> Tensor:
    hidden = torch.full_like(scores, -math.inf)
    out, lse = torch.zeros_like(values[:, 0]), hidden.logsumexp(-1)
    return out - torch.sigmoid(hidden.logsumexp(-1) - lse)[:, None] * out


@twin(scores(3, 8))
def online_softmax(x: Tensor) -> Tensor:
    most = torch.full((3, 1), -math.inf, dtype=x.dtype)
    total = torch.zeros(3, 1, dtype=x.dtype)
    for block in x.split(4, -1):
        now = torch.maximum(most, block.amax(-1, keepdim=True))
        total = total * torch.exp(most - now) + torch.exp(block - now).sum(-1, keepdim=True)
        most = now
    return torch.exp(x - most) / total


@twin(scores(3, 8))
def online_softmax_with_a_guard(x: Tensor) -> Tensor:
    x = torch.cat([torch.full_like(x[:, :4], -math.inf), x], -1)  # the first block is hidden
    most = torch.full((3, 1), -math.inf, dtype=x.dtype)
    total = torch.zeros(3, 1, dtype=x.dtype)
    for block in x.split(4, -1):
        now = torch.maximum(most, block.amax(-1, keepdim=True))
        safe = torch.where(now == -math.inf, 0.0, now)
        total = total * torch.exp(most - safe) + torch.exp(block - safe).sum(-1, keepdim=True)
        most = now
    return torch.exp(x - most) / total


@sister("sub")
def online_softmax_without_a_guard(x: Tensor) -> Tensor:
    x = torch.cat([torch.full_like(x[:, :4], -math.inf), x], -1)
    most = torch.full((3, 1), -math.inf, dtype=x.dtype)
    total = torch.zeros(3, 1, dtype=x.dtype)
    for block in x.split(4, -1):
        now = torch.maximum(most, block.amax(-1, keepdim=True))
        total = total * torch.exp(most - now) + torch.exp(block - now).sum(-1, keepdim=True)
        most = now
    return torch.exp(x - most) / total


# Under min and max.


@twin(scores(1, 2, 4, 4))
def max_pooling_with_padding(x: Tensor) -> Tensor:
    return F.max_pool2d(F.pad(x, (1, 1, 1, 1), value=-math.inf), 3, 2)


@sister("avg_pool2d")
def mean_pooling_with_that_padding(x: Tensor) -> Tensor:
    return F.avg_pool2d(F.pad(x, (1, 1, 1, 1), value=-math.inf), 3, 2)


@twin(scores(2, 8))
def maximum_that_starts_at_infinity(x: Tensor) -> Tensor:
    most = torch.full((2,), -math.inf, dtype=x.dtype)
    for block in x.split(4, -1):
        most = torch.maximum(most, block.amax(-1))
    return most


@twin(lambda draw: (draw.normal(6), torch.tensor([0, 0, 2, 2, 2, 0])))
def maximum_of_each_segment(x: Tensor, segment: Tensor) -> Tensor:
    most = x.new_full((4,), -math.inf).scatter_reduce(0, segment, x, "amax")
    return torch.where(torch.isinf(most), 0.0, most)  # segments without members


@twin(scores(2, 4, 3))
def viterbi(emissions: Tensor) -> Any:
    transitions = torch.zeros(3, 3, dtype=emissions.dtype)
    transitions[2, 0] = -math.inf
    best, path = emissions[:, 0], []
    for step in range(1, 4):
        found = (best[:, :, None] + transitions).max(1)
        best = found.values + emissions[:, step]
        path.append(found.indices)
    return best.max(-1).values, torch.stack(path)


@twin(scores(3, 3))
def dynamic_time_warping(x: Tensor) -> Tensor:
    table = torch.full((4, 4), math.inf, dtype=x.dtype)
    table[0, 0] = 0.0
    for i in range(1, 4):
        for j in range(1, 4):
            before = torch.stack([table[i - 1, j], table[i, j - 1], table[i - 1, j - 1]])
            table[i, j] = x[i - 1, j - 1].abs() + before.min()
    return table[3, 3]


@sister("mean")
def mean_of_that_table(x: Tensor) -> Tensor:
    table = torch.full((4, 4), math.inf, dtype=x.dtype)
    table[1:, 1:] = x.abs()
    return table.mean()


@twin(scores(4, 3))
def nearest_other_point(x: Tensor) -> Tensor:
    distances = (x[:, None] - x[None, :]).abs().sum(-1)
    return distances.fill_diagonal_(math.inf).min(-1).values


@sister("mul")
def diagonal_by_eye_times_infinity(x: Tensor) -> Tensor:
    distances = (x[:, None] - x[None, :]).abs().sum(-1)
    return (distances + torch.eye(4, dtype=x.dtype) * math.inf).min(-1).values


@twin(scores(4, 3))
def neighbours_by_topk(x: Tensor) -> tuple[Tensor, Tensor]:
    distances = (x[:, None] - x[None, :]).square().sum(-1)
    distances = distances + torch.diag(torch.full((4,), math.inf, dtype=x.dtype))
    nearest = distances.topk(2, largest=False)
    return (-nearest.values).softmax(-1), nearest.indices


@twin(scores_and_mask)
def sorted_with_a_sentinel(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    ordered = x.masked_fill(mask, math.inf).sort(-1)
    return ordered.values[..., 0], ordered.indices


@twin(scores_and_mask)
def median_of_what_is_not_hidden(x: Tensor, mask: Tensor) -> Tensor:
    half = (~mask).sum(-1, keepdim=True).sub(1) // 2
    return x.masked_fill(mask, math.inf).sort(-1).values.gather(-1, half)


@twin(scores(6))
def bins_without_ends(x: Tensor) -> Tensor:
    edges = torch.tensor([-math.inf, -1.0, 0.0, 1.0, math.inf], dtype=x.dtype)
    return torch.bucketize(x, edges)


@twin(scores_and_mask)
def smallest_and_largest_of_a_group(x: Tensor, mask: Tensor) -> Tensor:
    low = x.masked_fill(mask, math.inf).amin(-1)
    high = x.masked_fill(mask, -math.inf).amax(-1)
    return high - low


@sister("sub", a_row_hidden)
def span_of_two_equal_infinities(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(mask, math.inf).amin(-1) - x.masked_fill(mask, math.inf).amax(-1)


class LastOfEach(nn.Module):
    """A GRU over rows of two lengths; padding does not win the maximum over time."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.gru(x)
        padding = torch.arange(5)[None, :, None] >= torch.tensor([5, 3])[:, None, None]
        return out.masked_fill(padding, -math.inf).amax(1)


twin(scores(2, 5, 3))(LastOfEach)


# Losses.


@twin(scores(3, 5))
def loss_with_forbidden_classes(logits: Tensor) -> Tensor:
    logits[:, 4] = -math.inf
    return F.cross_entropy(logits, torch.tensor([0, 3, -100]), ignore_index=-100)


@sister("cross_entropy")
def loss_of_a_forbidden_target(logits: Tensor) -> Tensor:
    logits[:, 4] = -math.inf
    return F.cross_entropy(logits, torch.tensor([0, 4, -100]), ignore_index=-100)


@sister("cross_entropy")
def loss_that_smooths_over_the_forbidden(logits: Tensor) -> Tensor:
    logits[:, 4] = -math.inf
    return F.cross_entropy(logits, torch.tensor([0, 3, 2]), label_smoothing=0.1)


@twin(scores(4, 6))
def contrast_with_the_others(x: Tensor) -> Tensor:
    x = F.normalize(x, dim=-1)
    similar = (x @ x.mT / 0.5).fill_diagonal_(-math.inf)
    return F.cross_entropy(similar, torch.tensor([1, 0, 3, 2]))


@sister("mul")
def contrast_that_multiplies_by_the_mask(x: Tensor) -> Tensor:
    x = F.normalize(x, dim=-1)
    similar = (x @ x.mT / 0.5).fill_diagonal_(-math.inf).log_softmax(-1)
    return -(similar * (1 - torch.eye(4, dtype=x.dtype))).sum(-1).mean()


@twin(scores_and_mask)
def mean_of_what_is_not_hidden(x: Tensor, mask: Tensor) -> Tensor:
    logits = x.masked_fill(mask, -math.inf)
    kept = torch.where(mask, 0.0, logits)
    return kept.sum(-1) / (~mask).sum(-1).clamp(min=1)


@sister("mean")
def mean_of_what_is_hidden(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(mask, -math.inf).mean(-1)


@sister("linear|addmm|mm")
def weights_on_what_is_hidden(x: Tensor, mask: Tensor) -> Tensor:
    return F.linear(x.masked_fill(mask, -math.inf), torch.ones(2, 5, dtype=x.dtype))


@twin(lambda draw: (draw.normal(2, 4, 2), draw.hidden(2, 4)))
def proposals_of_padding(x: Tensor, padding: Tensor) -> Tensor:
    proposals = torch.full_like(x, 0.25)
    proposals = torch.log(proposals / (1 - proposals)).masked_fill(padding[..., None], math.inf)
    return torch.sigmoid(x + proposals)


@twin(scores(2, 6))
def running_extremes(x: Tensor) -> Tensor:
    start = torch.full_like(x[:, :1], -math.inf)
    most = torch.cat([start, x], -1).cummax(-1).values
    total = torch.cat([start, x], -1).logcumsumexp(-1)
    return most[:, 1:] + total[:, 1:]
