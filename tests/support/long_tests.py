"""Cases that take long, and when they run.

- ``./dev test`` runs what is marked neither ``slow`` nor ``campaign``, in ten minutes on two cores.
- CI also runs what is slow, on each change.
- ``./dev campaign`` runs the rest: cases whose promise another case, or another test, keeps in
  less time on each change.

``tests/conftest.py`` sets the marks. ``tests/repository/test_long_tests.py`` holds each entry to
what is collected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

__all__ = ["ALL", "CI", "LONG", "OTHERS", "SAMPLED", "Long", "collected", "marks_of"]


@dataclass(frozen=True)
class Long:
    """A test, or a file of tests, of which some cases, or all, are left to CI or to a campaign."""

    test: str  # "capture/test_compile.py::test_autocast_keeps_every_bit", or the file alone
    cases: tuple[str, ...]  # their ids
    covered_by: str  # what keeps the promise on each change: CI, OTHERS, or another test

    @property
    def mark(self) -> str:
        """``slow`` where CI runs it, else ``campaign``."""
        return "slow" if self.covered_by == CI else "campaign"

    def names(self, case: str) -> bool:
        """Whether it names a case, such as ``guard/test_watch.py::test_compiled_losses[sum]``."""
        test, _, name = case.removesuffix("]").partition("[")
        if self.cases != ALL:
            return test == self.test and name in self.cases
        return test == self.test or test.partition("::")[0] == self.test


ALL = ("*",)
CI = "CI"
OTHERS = "the other cases of the test"
BITS = "whole/bits_unchanged/test_models.py::test_results_are_bitwise_equal"
PLANTED = "rerun/test_whole_graph.py::test_a_planted_fault_gives_the_report_of_the_full_mode"

# The mark of each case that this run has collected, before `-m` chose.
collected: dict[str, str] = {}

# Of tests in these files that CI runs in as many cases or more, ``./dev test`` runs every third.
MANY = 12
SAMPLED = (
    "cli/test_like_python.py",
    "graph/test_higher_order.py",
    "graph/test_operations.py",
    "guard/test_backward_passes.py",
    "forecasting/test_keep_float32.py",
    "repository/test_famous_nans.py",
    "rerun/test_whole_graph.py",
    "verdict/test_underflow.py",
    "whole/names_the_cause/test_planted_faults.py",
    "whole/names_the_cause/test_small_stories.py",
    "whole/no_false_alarm/test_twins.py",
    "whole/nothing_unseen/test_every_forward.py",
    "whole/nothing_unseen/test_odd_tensors.py",
)

LONG = (
    *(
        Long(test, ALL, CI)
        for test in (
            "capture/test_quiet.py",
            *(
                f"cli/test_run.py::{test}"
                for test in (
                    "test_a_model_that_was_called_is_saved_as_it_is",
                    "test_a_module_sees_what_python_shows_it",
                    "test_a_script_sees_what_python_shows_it",
                    "test_models_in_spawned_processes_are_checked",
                    "test_other_values_switch_nothing_on",
                    "test_ranks_that_are_well_are_counted_together",
                    "test_the_rank_that_fails_is_named",
                    "test_the_variable_cannot_change_the_status_of_a_script",
                    "test_the_variable_does_what_the_command_does",
                    "test_torch_is_imported_whatever_happens",
                    "test_workers_of_a_data_loader_are_checked",
                )
            ),
            "comparison/test_planted.py",
            "guard/test_compiled_autograd.py",
            "guard/test_compiled_steps.py",
            "guard/test_coverage.py",
            "integrations/test_grad_scaler.py",
            "integrations/test_lightning.py",
            "integrations/test_trainer.py",
            "measure/test_gpu.py",
            "measure/test_inductor.py",
            "forecasting/test_keep_float32.py::test_on_two_ranks",
            "forecasting/test_properties.py",
            "ranks/test_backward_of_ranks.py",
            "ranks/test_distributed.py",
            "ranks/test_exchanges.py",
            "ranks/test_netcheck.py",
            "ranks/test_pipelines.py::test_two_ranks",
            "ranks/test_second_runs.py",
            "report/test_page.py",
            "report/test_page_opens.py",
            "report/test_terminal.py::test_a_real_terminal",
            "repository/test_any_cpu.py::test_a_sample_holds_with_other_kernels",
            "repository/test_benchmarks.py",
            "repository/test_gpu_program.py::test_the_smallest_sizes_pass_on_a_cpu",
            "repository/test_release.py",
            "repository/test_site.py",
            "repository/test_symptoms.py",
            "repository/test_typing.py",
            "testing/test_properties.py",
            "testing/test_real_functions.py",
            "whole/bits_unchanged/test_models.py",
            "whole/bits_unchanged/test_operator_database.py",
            "whole/names_the_cause/test_planted_gradients.py",
            "whole/no_false_alarm/test_architectures.py",
        )
    ),
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
    Long("cli/test_run.py::test_a_module_sees_what_python_shows_it", ("package.part",), OTHERS),
    Long("cli/test_run.py::test_a_script_sees_what_python_shows_it", ("below/script.py",), OTHERS),
    Long("cli/test_run.py::test_other_values_switch_nothing_on", ("off", "false"), OTHERS),
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
            "llama-train-masked",
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
    Long(
        "guard/test_coverage.py::test_every_planted_nan_is_found", ("bert", "vit", "llama"), OTHERS
    ),
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
            *("dtype0-bert", "dtype1-vit"),
        ),
        OTHERS,
    ),
    Long(
        "guard/test_watch.py::test_compiled_losses",
        ("length-backward of sqrt made inf-inductor",),
        OTHERS,
    ),
    Long("forecasting/test_keep_float32.py::test_on_two_ranks", ("ddp",), OTHERS),
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
    Long("ranks/test_distributed.py::test_no_rank_hangs", ("alone",), OTHERS),
    *(
        Long(
            f"repository/test_benchmarks.py::{test}",
            ALL,
            "repository/test_benchmarks.py::test_overhead_runs_every_tool",
        )
        for test in (
            "test_replay_measures_each_way",
            "test_versions_needs_a_checkout",
            "test_whole_step_compares_steps_with_and_without_gradients",
        )
    ),
    Long(
        "repository/test_examples.py::test_a_repaired_training_goes_on",
        ALL,
        "forecasting/test_plan.py::test_the_plan_of_a_stream_that_does_not_fit",
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
            *("twice-True-eager", "in_place-True-eager", "encoder-True-eager"),
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
        ("t5-float32-0", "resnet-float32-0", "gpt2-float32-2"),
        OTHERS,
    ),
    Long(
        "whole/names_the_cause/test_planted_gradients.py::test_gradients_of_small_models",
        ("in_place",),
        OTHERS,
    ),
    Long(
        "whole/nothing_unseen/test_every_operation.py::test_frames_hold_every_result_of_the_oracle",
        ("t5-captured-float32", "bert-captured-float32"),
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


def marks_of(cases: Mapping[str, str]) -> dict[str, str]:
    """The mark of each case.

    Args:
        cases: the names of all that were collected, as pytest has them below ``tests/``, in its
            order, with the mark that stands in the file: ``campaign``, ``slow`` or none, "".
    """
    marks = {case: _heavier({own, *_listed(case)}) for case, own in cases.items()}
    sizes = Counter(case.partition("[")[0] for case, mark in marks.items() if not mark)
    seen: Counter[str] = Counter()
    for case, mark in marks.items():
        test = case.partition("[")[0]
        if mark or test.partition("::")[0] not in SAMPLED or sizes[test] < MANY:
            continue
        seen[test] += 1
        if seen[test] % 3 != 1:
            marks[case] = "slow"
    return marks


def _listed(case: str) -> Iterator[str]:
    return (long.mark for long in LONG if long.names(case))


def _heavier(marks: Collection[str]) -> str:
    return next((mark for mark in ("campaign", "slow") if mark in marks), "")
