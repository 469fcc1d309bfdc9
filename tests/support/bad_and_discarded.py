"""Idioms in which a pole or a NaN is made and nothing that leaves the model depends on it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - everybody writes F
from torch import Tensor

from support.twins import WIDE, Draw, Twins

DISCARDED = Twins()
twin, sister, gone_wrong = DISCARDED.twin, DISCARDED.sister, DISCARDED.gone_wrong


def with_a_zero(draw: Draw) -> tuple[Tensor, ...]:
    return (draw.of(0.0, 0.5, 2.0, 4.0),)


def with_both_signs(draw: Draw) -> tuple[Tensor, ...]:
    return (draw.of(-1.0, 0.0, 0.5, 2.0),)


def fractions(draw: Draw) -> tuple[Tensor, ...]:
    """Numerators and denominators: 0/0, a finite quotient, 1/0."""
    return draw.of(0.0, 1.0, 2.0, 3.0), draw.exact(0.0, 2.0, 0.0, 4.0)


def zero_by_zero(draw: Draw) -> tuple[Tensor, ...]:
    return draw.of(0.0, 1.0, 2.0), draw.exact(0.0, 2.0, 4.0)


def labels_with_gaps(draw: Draw) -> tuple[Tensor, ...]:
    labels = draw.normal(2, 4)
    labels[0, 1] = labels[1, 2] = math.nan
    return draw.normal(2, 4), labels


# Poles.


@twin(lambda draw: (draw.normal(1, 5, 5), torch.arange(5)))
def position_buckets_of_t5(scores: Tensor, position: Tensor) -> Tensor:
    distance = (position[:, None] - position[None, :]).clamp(min=0)
    is_small = distance < 2
    large = 2 + (torch.log(distance.float() / 2) / math.log(4) * 2).to(torch.long)
    large = torch.min(large, torch.full_like(large, 3))
    bucket = torch.where(is_small, distance, large)
    return scores + torch.arange(4, dtype=scores.dtype)[bucket]


@sister("log")
def logarithms_of_distances(scores: Tensor, position: Tensor) -> Tensor:
    distance = (position[:, None] - position[None, :]).clamp(min=0)
    return scores + torch.log(distance.float() / 2)


@twin(fractions)
def quotient_in_the_branch_not_taken(x: Tensor, d: Tensor) -> Tensor:
    return torch.where(d != 0, x / d, 0.0)


@sister("div")
def quotient_in_the_branch_taken(x: Tensor, d: Tensor) -> Tensor:
    return torch.where(x != 0, x / d, 0.0)


@twin(lambda draw: (draw.of(0.0, 1.0, 2.0), draw.exact(0.0, 2.0, 0.0)), holds_bad=False)
def division_made_safe(x: Tensor, d: Tensor) -> Tensor:
    return x / torch.where(d == 0, 1.0, d)


@twin(with_both_signs)
def logarithm_of_what_is_positive(x: Tensor) -> Tensor:
    return torch.where(x > 0, torch.log(x), 0.0)


@sister("log")
def logarithm_of_what_is_not_negative(x: Tensor) -> Tensor:
    return torch.where(x >= 0, torch.log(x), 0.0)


@twin(with_a_zero)
def logarithm_that_is_clamped(p: Tensor) -> Tensor:
    return -(p.log().clamp(min=-100.0)).mean()


gone_wrong("log", with_both_signs)


@twin(lambda draw: (draw.exact(0.0, 1.0, 0.5), draw.exact(0.0, 1.0, 1.0)))
def binary_cross_entropy_by_hand(p: Tensor, y: Tensor) -> Tensor:
    return -(y * p.log().clamp(min=-100) + (1 - y) * torch.log1p(-p).clamp(min=-100)).mean()


@sister("log|mul")
def binary_cross_entropy_without_a_clamp(p: Tensor, y: Tensor) -> Tensor:
    return -(y * p.log() + (1 - y) * torch.log1p(-p)).mean()


@twin(with_a_zero)
def entropy_by_where(p: Tensor) -> Tensor:
    p = p / p.sum()
    return -torch.where(p > 0, p * p.log(), 0.0).sum()


@sister("log|mul")
def entropy_of_a_zero(p: Tensor) -> Tensor:
    p = p / p.sum()
    return -(p * p.log()).sum()


@twin(with_a_zero, holds_bad=False)
def divergence_by_xlogy(p: Tensor) -> Tensor:
    p = p / p.sum()
    return (torch.xlogy(p, p) - p * torch.log(p.new_full((4,), 0.25))).sum()


@twin(lambda draw: (draw.normal(2, 4), draw.exact([1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 1.0])))
def mask_by_its_logarithm(scores: Tensor, mask: Tensor) -> Tensor:
    return (scores + mask.log()).softmax(-1)


@sister("log")
def scores_masked_by_a_logarithm(scores: Tensor, mask: Tensor) -> Tensor:
    return scores + mask.log()


@twin(lambda draw: (draw.normal(3, 4), draw.exact(0.0, 0.25, 0.5, 0.25)))
def mixture_with_an_empty_component(log_density: Tensor, weights: Tensor) -> Tensor:
    return torch.logsumexp(log_density + weights.log(), -1)


gone_wrong("log", lambda draw: (draw.normal(3, 4), draw.exact(0.0, 0.0, 0.0, 0.0)))


@twin(lambda draw: (draw.normal(4, 3),))
def hidden_markov_model(emissions: Tensor) -> Tensor:
    transitions = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.0, 0.0, 1.0]])
    transitions = transitions.to(emissions.dtype).log()
    alpha = emissions.new_tensor([1.0, 0.0, 0.0]).log()
    for emission in emissions:
        alpha = torch.logsumexp(alpha[:, None] + transitions, 0) + emission
    return torch.logsumexp(alpha, -1)


@twin(lambda draw: (draw.normal(4, 3), draw.exact(0.0, 2.0, 1.0, 2.0)))
def degrees_of_a_graph(x: Tensor, degree: Tensor) -> Tensor:
    norm = degree.pow(-0.5)
    return x * norm.masked_fill_(norm == math.inf, 0)[:, None]


@sister("pow")
def degrees_of_a_node_without_edges(x: Tensor, degree: Tensor) -> Tensor:
    return x * degree.pow(-0.5)[:, None]


@twin(fractions)
def angle_by_a_quotient(x: Tensor, d: Tensor) -> Tensor:
    return torch.atan((x + 1) / d)


gone_wrong("div", lambda draw: (draw.exact(-1.0, 1.0), draw.exact(0.0, 2.0)))


@twin(lambda draw: (draw.of(0.0, 1.0, 2.0), draw.of(3.0, 1.0, 0.0)))
def harmonic_mean(a: Tensor, b: Tensor) -> Tensor:
    return 2 / (1 / a + 1 / b)


@sister("reciprocal|div")
def mean_of_reciprocals(a: Tensor, b: Tensor) -> Tensor:
    return (1 / a + 1 / b) / 2


@twin(with_a_zero)
def smooth_step(t: Tensor) -> Tensor:
    return torch.exp(-1 / t)


@twin(with_a_zero)
def weights_by_signal_to_noise(sigma: Tensor) -> Tensor:
    snr = 1 / sigma.square()
    return torch.minimum(snr, torch.full_like(snr, 5.0)) / snr


@sister("reciprocal|div|mul")
def signal_to_noise_times_the_noise(sigma: Tensor) -> Tensor:
    return 1 / sigma.square() * sigma


@twin(lambda draw: (draw.exact(0.0, 0.25, 1.0),))
def logit_and_back(p: Tensor) -> Tensor:
    return torch.sigmoid(torch.logit(p) / 2)


@sister("logit")
def logit_returned(p: Tensor) -> Tensor:
    return torch.logit(p) / 2


@twin(lambda draw: (draw.exact(0.0, 0.25, 1.0),), dtypes=WIDE)
def quantile_of_a_normal_that_is_clamped(p: Tensor) -> Tensor:
    return torch.erfinv(2 * p - 1).clamp(-5, 5)


@twin(lambda draw: (draw.positive(2, 3), draw.exact([0.0, 1.0, 2.0], [3.0, 1.0, 0.0])))
def box_targets_of_padding(now: Tensor, before: Tensor) -> Tensor:
    valid = before > 0
    target = torch.log(now / before).masked_fill(~valid, 0.0)
    return (target * valid).sum() / valid.sum().clamp(min=1)


@sister("div")
def box_targets_times_their_mask(now: Tensor, before: Tensor) -> Tensor:
    valid = before > 0
    return (torch.log(now / before) * valid).sum() / valid.sum().clamp(min=1)


# NaN.


@twin(lambda draw: (draw.normal(3, 4), draw.row_hidden(3, 4)))
def hidden_rows_to_zero(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask, -math.inf).softmax(-1).nan_to_num(0)


@sister("softmax")
def hidden_rows_times_zero(scores: Tensor, mask: Tensor) -> Tensor:
    weights = scores.masked_fill(mask, -math.inf).softmax(-1)
    return weights * (~mask.all(-1, keepdim=True))


@twin(lambda draw: (draw.normal(3, 4), draw.row_hidden(3, 4)))
def hidden_rows_filled(scores: Tensor, mask: Tensor) -> Tensor:
    weights = scores.masked_fill(mask, -math.inf).softmax(-1)
    return weights.masked_fill(mask.all(-1, keepdim=True), 0.0) @ scores.mT


@twin(lambda draw: (draw.normal(3, 4), draw.row_hidden(3, 4)))
def hidden_rows_left_out(scores: Tensor, mask: Tensor) -> Tensor:
    log_probabilities = scores.masked_fill(mask, -math.inf).log_softmax(-1)
    return torch.where(mask, 0.0, log_probabilities).sum(-1)


@sister("log_softmax")
def hidden_rows_left_in(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask, -math.inf).log_softmax(-1)[..., 0]


@twin(zero_by_zero)
def nan_replaced_where_it_is(x: Tensor, d: Tensor) -> Tensor:
    ratio = x / d
    return torch.where(torch.isnan(ratio), 0.0, ratio)


@sister("div")
def nan_replaced_where_it_is_not(x: Tensor, d: Tensor) -> Tensor:
    ratio = x / d
    return torch.where(ratio > 0, 0.0, ratio)


@twin(zero_by_zero)
def nan_is_not_itself(x: Tensor, d: Tensor) -> Tensor:
    ratio = x / d
    ratio[ratio != ratio] = 0
    return ratio


@twin(zero_by_zero)
def precision_of_an_absent_class(hits: Tensor, found: Tensor) -> Tensor:
    precision = (hits / found).nan_to_num(0)
    return (2 * precision / (precision + 1)).mean()


@sister("div", dtypes=WIDE)
def an_argmax_among_nan(hits: Tensor, found: Tensor) -> Tensor:
    return (hits / found).argmax()


@sister("div", dtypes=WIDE)
def a_comparison_with_nan(hits: Tensor, found: Tensor) -> Tensor:
    return (hits / found) > 0.1


@twin(labels_with_gaps)
def labels_with_gaps_masked(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(torch.isnan(y), 0.0, x - y).square().mean()


@sister("argument `input[1]`|input[1]|argument `args[1]` of Function.forward")
def labels_with_gaps_times_a_mask(x: Tensor, y: Tensor) -> Tensor:
    return ((x - y) * ~torch.isnan(y)).square().mean()


@twin(labels_with_gaps)
def labels_with_gaps_selected(x: Tensor, y: Tensor) -> Tensor:
    known = ~torch.isnan(y)
    return F.mse_loss(x[known], y[known])


@twin(labels_with_gaps)
def mean_of_what_is_known(x: Tensor, y: Tensor) -> Any:
    return torch.nanmean(x - y, -1), torch.nansum(y)


@twin(labels_with_gaps, dtypes=WIDE)
def median_and_quantile_of_what_is_known(x: Tensor, y: Tensor) -> Any:
    return torch.nanmedian(x - y), torch.nanquantile(y, 0.5, -1)


@twin(labels_with_gaps)
def smaller_number_that_is_known(x: Tensor, y: Tensor) -> Tensor:
    return torch.fmin(x, y) + torch.fmax(x, y)


@twin(fractions)
def only_what_is_finite(x: Tensor, d: Tensor) -> Tensor:
    ratio = x / d
    return torch.where(torch.isfinite(ratio), ratio, 0.0).sum() / torch.isfinite(ratio).sum()


@twin(fractions)
def only_what_is_finite_selected(x: Tensor, d: Tensor) -> Tensor:
    ratio = x / d
    return ratio[torch.isfinite(ratio)].mean()


@twin(with_both_signs)
def root_of_what_is_positive(x: Tensor) -> Tensor:
    return torch.where(x > 0, torch.sqrt(x), 0.0)


@sister("sqrt")
def root_of_all(x: Tensor) -> Tensor:
    return torch.sqrt(x).clamp(min=0)


@twin(lambda draw: (draw.normal(3, 4), draw.exact(*[[1.0, 1.0, 0.0, 0.0], [0.0] * 4, [1.0] * 4])))
def mean_of_an_empty_row(x: Tensor, mask: Tensor) -> Tensor:
    count = mask.sum(-1)
    return torch.where(count > 0, (x * mask).sum(-1) / count, 0.0)


@sister("div")
def mean_of_an_empty_row_returned(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum(-1) / mask.sum(-1)


@twin(lambda draw: (draw.positive(3, 2), draw.exact([1.0, 1.0], [0.0, 0.0], [2.0, 2.0])))
def overlap_of_empty_boxes(a: Tensor, b: Tensor) -> Tensor:
    both = torch.minimum(a, b).prod(-1) * (b.prod(-1) > 0)
    union = (a * (b > 0)).prod(-1) + b.prod(-1) - both
    return torch.nan_to_num(both / union, nan=0.0)


@twin(lambda draw: (draw.normal(1, 4), draw.normal(3, 4)))
def deviation_of_one_sample(one: Tensor, many: Tensor) -> Tensor:
    deviation = one.std(0)
    deviation = torch.where(torch.isnan(deviation), torch.ones_like(deviation), deviation)
    return many / deviation


@sister("std")
def deviation_of_one_sample_with_eps(one: Tensor, many: Tensor) -> Tensor:
    return many / (one.std(0) + 1e-4)
