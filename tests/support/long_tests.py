"""Cases that take long: ``./dev campaign`` runs them, and each change runs others in their place.

A case belongs here when another case of the same test, or another test, keeps the same promise in
less time. ``tests/conftest.py`` marks the cases ``campaign``.
``tests/repository/test_long_tests.py`` holds each entry to what is collected.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ALL", "LONG", "OTHERS", "Long", "collected", "is_long"]


@dataclass(frozen=True)
class Long:
    """A test of which some cases, or all, are a campaign."""

    test: str  # "capture/test_compile.py::test_autocast_keeps_every_bit"
    cases: tuple[str, ...]  # their ids
    covered_by: str  # what keeps the promise on each change: OTHERS, or another test


ALL = ("*",)
OTHERS = "the other cases of the test"
BITS = "whole/bits_unchanged/test_models.py::test_results_are_bitwise_equal"
PLANTED = "rerun/test_whole_graph.py::test_a_planted_fault_gives_the_report_of_the_full_mode"

# Name of each case that this run has collected, before `-m` chose: whether it is a campaign.
collected: dict[str, bool] = {}

LONG = (
    Long(
        "capture/test_compile.py::test_fullgraph_training_keeps_every_bit",
        ("t5", "llama", "whisper", "vit"),
        OTHERS,
    ),
    Long("capture/test_compile.py::test_the_backend_alone_checks_too", ("bert", "llama"), OTHERS),
    Long("capture/test_compile.py::test_autocast_keeps_every_bit", ("bert",), OTHERS),
    Long(
        "capture/test_compile.py::test_evaluation_modes_keep_every_bit",
        ("gpt2-no_grad", "gpt2-inference_mode"),
        OTHERS,
    ),
    Long("cli/test_run.py::test_models_in_spawned_processes_are_checked", ("1.0-0",), OTHERS),
    Long("cli/test_run.py::test_workers_of_a_data_loader_are_checked", ("fork-1-0",), OTHERS),
    Long("cli/test_run.py::test_the_rank_that_fails_is_named", ("variable",), OTHERS),
    Long(
        "cli/test_run.py::test_the_variable_serves_spawned_processes",
        ALL,
        "cli/test_run.py::test_the_variable_does_what_the_command_does",
    ),
    Long(
        "debug_utils/test_drop_in.py::test_module_frames_are_those_of_the_original",
        (
            *("llama-eval-plain", "gpt2-train-masked", "bert-train-masked", "mixtral-eval-plain"),
            *("vit-eval-plain", "whisper-eval-plain", "encoder-eval-plain", "gpt2-eval-plain"),
        ),
        OTHERS,
    ),
    Long(
        "graph/test_higher_order.py::test_transformers_gradient_checkpointing",
        ALL,
        "whole/names_the_cause/test_planted_faults.py::test_the_planted_operation_is_blamed",
    ),
    Long(
        "graph/test_operations.py::test_the_rules_hold_for_the_operator_database",
        ("c", "f", "l", "m", "n", "r", "s"),
        OTHERS,
    ),
    *(
        Long(f"guard/test_compiled_autograd.py::{test}", cases, OTHERS)
        for test, cases in (
            ("test_nothing_changes", ("aot_eager, fullgraph=True", "inductor")),
            ("test_bad_gradients_are_said", ("aot_eager, fullgraph=True", "inductor")),
            ("test_it_is_raised_from_backward", ("aot_eager, fullgraph=True",)),
        )
    ),
    Long("guard/test_coverage.py::test_every_planted_nan_is_found", ("bert", "vit"), OTHERS),
    Long(
        "guard/test_coverage.py::test_the_self_test_runs_under_the_active_backend",
        ("inductor",),
        "measure/test_inductor.py::test_found_in_a_body_under_inductor",
    ),
    Long(
        "guard/test_underflow.py::test_healthy_models_underflow_nowhere",
        (
            *("dtype0-t5", "dtype0-llama", "dtype0-mixtral", "dtype0-vit"),
            *("dtype1-t5", "dtype1-llama", "dtype1-bert", "dtype1-mixtral"),
        ),
        OTHERS,
    ),
    Long(
        "guard/test_watch.py::test_compiled_losses",
        ("length-backward of sqrt made inf-inductor",),
        OTHERS,
    ),
    Long("integrations/test_trainer.py::test_overflow_in_training", ("everything",), OTHERS),
    Long(
        "integrations/test_trainer.py::test_training_is_what_it_was",
        ("everything",),
        "integrations/test_trainer.py::test_overflow_in_training",
    ),
    Long(
        "integrations/test_lightning.py::test_training_is_what_it_was",
        ("{'precision': 'bf16-mixed'}", "{'precision': '64-true'}"),
        OTHERS,
    ),
    Long(
        "integrations/test_lightning.py::test_overflow_in_the_loss",
        ("32-true-False", "bf16-mixed-True"),
        OTHERS,
    ),
    Long("integrations/test_lightning.py::test_two_ranks", ("sharded fault",), OTHERS),
    Long("measure/test_inductor.py::test_large_inputs_are_read_in_c", ("False",), OTHERS),
    Long(
        "ranks/test_distributed.py::test_ranks",
        (
            *("ddp-before-aot_eager-False-raise-input-2", "ddp-after--False-raise-input-2"),
            *("fsdp-before--False-raise-input-2", "fsdp-after-aot_eager-False-raise-input-2"),
            *("ddp-before--True-raise-input-2", "ddp-before-aot_eager-True-raise-input-2"),
            *("ddp-before--False-raise-everywhere-2", "ddp-before--False-warn-everywhere-2"),
        ),
        OTHERS,
    ),
    Long(
        "repository/test_examples.py::test_a_repaired_training_goes_on",
        ALL,
        "precision/test_plan.py::test_the_plan_of_a_stream_that_does_not_fit",
    ),
    Long(
        "rerun/test_reproducer.py::test_each_story_becomes_a_test_that_fails_for_the_same_reason",
        (
            *("t5_wo", "gemma3_residual", "qk_before_scale", "flux_clip_hides", "where_double"),
            *("mask_min_minus_score", "moe_residual_fp16", "rwkv_exp_half", "weight_norm_zero"),
            *("pool_clamp_eps", "focal_fp16", "mamba_A_exp", "infonce_exp", "std_of_one"),
            *("acos_one", "log1p_saturated", "mask_add_grad"),
        ),
        OTHERS,
    ),
    Long(
        "rerun/test_reproducer.py::test_it_needs_torch_and_pytest_only",
        ("distilbert_mask_row",),
        OTHERS,
    ),
    Long("rerun/test_whole_graph.py::test_transformers_are_blamed_alike", ("resnet",), PLANTED),
    Long(
        PLANTED,
        (
            *("twice-True-eager", "in_place-True-eager"),
            *("containers-True-eager", "containers-False-aot_eager"),
        ),
        OTHERS,
    ),
    Long(
        "whole/names_the_cause/test_running_models.py::test_a_weight_is_named",
        ("inf",),
        OTHERS,
    ),
    Long("testing/test_pytest_plugin.py::test_the_option", ("2",), OTHERS),
    Long("testing/test_stability.py::test_healthy_models", ("llama",), OTHERS),
    Long("testing/test_stability_of_gradients.py::test_healthy_models", ("llama",), OTHERS),
    Long("trace/test_diff.py::test_rounding_is_no_difference", ("bert-dtype0",), OTHERS),
    Long(
        BITS,
        (
            *("gpt2-float32-train-masked", "mixtral-float32-train-masked"),
            *("vit-float32-eval-plain", "vit-bfloat16-train-plain", "vit-bfloat16-eval-plain"),
            *("resnet-float32-eval-plain", "resnet-bfloat16-train-plain"),
            *("resnet-bfloat16-eval-plain", "cnn-float32-eval-plain", "lstm-float32-eval-plain"),
            "whisper-float32-train-masked",
        ),
        OTHERS,
    ),
    Long(
        "whole/bits_unchanged/test_models.py::test_results_are_bitwise_equal_under_aot_eager",
        ("resnet", "lstm", "twice"),
        OTHERS,
    ),
    Long(
        "whole/bits_unchanged/test_watched_steps.py::test_watched_steps_are_bitwise_equal",
        ("t5-float32-0", "resnet-float32-0"),
        OTHERS,
    ),
    Long(
        "whole/names_the_cause/test_planted_faults.py::test_the_planted_operation_is_blamed",
        (
            *("bert-eager-float32-eval-nan", "resnet-eager-float32-eval-nan"),
            *("lstm-aot_eager-float32-eval-nan", "twice-aot_eager-float32-eval-nan"),
            *("containers-aot_eager-float32-eval-nan", "in_place-python-float32-eval-nan"),
            *("twice-python-float32-eval-nan", "containers-python-float32-eval-nan"),
        ),
        OTHERS,
    ),
)


def is_long(node: str) -> bool:
    """Whether a case, by pytest's name of it, is a campaign."""
    test, _, case = node.removeprefix("tests/").removesuffix("]").partition("[")
    return any(each.test == test and (each.cases == ALL or case in each.cases) for each in LONG)
