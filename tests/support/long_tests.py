"""Cases that take long: ``./dev campaign`` runs them, and each change runs others in their place.

A case belongs here when another case of the same test, or another test, keeps the same promise in
less time. ``tests/conftest.py`` marks the cases ``campaign``.
``tests/repository/test_long_tests.py`` holds each entry to what is collected.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LONG", "Long", "is_long"]


@dataclass(frozen=True)
class Long:
    """A test of which some cases, or all, are a campaign."""

    test: str  # "capture/test_compile.py::test_autocast_keeps_every_bit"
    stay: tuple[str, ...]  # ids of the cases that each change runs; () where the test has none
    covered_by: str  # what keeps the promise on each change: these cases, or another test


THESE = "the cases that stay"

LONG = (
    Long(
        "capture/test_compile.py::test_fullgraph_training_keeps_every_bit",
        ("bert", "cnn", "twice", "containers"),
        "whole/bits_unchanged/test_models.py::test_results_are_bitwise_equal",
    ),
    Long("capture/test_compile.py::test_the_backend_alone_checks_too", ("cnn",), THESE),
    Long("capture/test_compile.py::test_autocast_keeps_every_bit", ("llama",), THESE),
    Long(
        "capture/test_compile.py::test_evaluation_modes_keep_every_bit",
        ("encoder-no_grad", "encoder-inference_mode", "lstm-no_grad", "lstm-inference_mode"),
        THESE,
    ),
    Long(
        "rerun/test_reproducer.py::test_each_story_becomes_a_test_that_fails_for_the_same_reason",
        (
            *("rmsnorm_square", "mask_times_inf", "distilbert_mask_row", "ce_all_ignored"),
            *("ctc_short", "sqrt_zero", "k3_clip_after", "fp16_grad_overflow", "pow_zero"),
        ),
        THESE,
    ),
    Long("rerun/test_reproducer.py::test_it_needs_torch_and_pytest_only", ("sqrt_zero",), THESE),
    Long(
        "rerun/test_whole_graph.py::test_transformers_are_blamed_alike",
        (),
        "rerun/test_whole_graph.py::test_a_planted_fault_gives_the_report_of_the_full_mode",
    ),
    Long(
        "rerun/test_whole_graph.py::test_a_planted_fault_gives_the_report_of_the_full_mode",
        ("cnn-True-eager", "encoder-True-eager", "in_place-False-aot_eager", "lstm-True-eager"),
        THESE,
    ),
    Long(
        "guard/test_coverage.py::test_every_planted_nan_is_found",
        ("llama", "cnn", "in_place"),
        THESE,
    ),
    Long(
        "guard/test_coverage.py::test_the_self_test_runs_under_the_active_backend",
        ("aot_eager",),
        "measure/test_inductor.py::test_found_in_a_body_under_inductor",
    ),
    Long(
        "ranks/test_distributed.py::test_ranks",
        (
            *("ddp-before--False-raise-input-2", "ddp-after-aot_eager-False-raise-input-2"),
            *("fsdp-before-aot_eager-False-raise-input-2", "fsdp-after--False-raise-input-2"),
            *("ddp-before--True-raise-everywhere-2", "ddp-before--True-warn-input-2"),
            *("fsdp-before--False-raise-weight-2", "tp-before--False-raise-everywhere-2"),
        ),
        THESE,
    ),
    Long(
        "repository/test_examples.py::test_a_repaired_training_goes_on",
        (),
        "precision/test_plan.py::test_the_plan_of_a_stream_that_does_not_fit",
    ),
    Long(
        "integrations/test_trainer.py::test_training_is_what_it_was",
        (),
        "integrations/test_trainer.py::test_overflow_in_training",
    ),
    Long("integrations/test_trainer.py::test_overflow_in_training", ("plain",), THESE),
    Long(
        "integrations/test_lightning.py::test_training_is_what_it_was",
        ("{}", "{'accumulate_grad_batches': 2}"),
        THESE,
    ),
    Long(
        "integrations/test_lightning.py::test_overflow_in_the_loss",
        ("32-true-True", "bf16-mixed-False"),
        THESE,
    ),
    Long("integrations/test_lightning.py::test_two_ranks", ("fault",), THESE),
    Long("measure/test_inductor.py::test_large_inputs_are_read_in_c", ("True",), THESE),
)


def is_long(node: str) -> bool:
    """Whether a case, by pytest's name of it, is a campaign."""
    test, _, case = node.removeprefix("tests/").removesuffix("]").partition("[")
    return any(long.test == test and case not in long.stay for long in LONG)
