"""``python -m tests``: format, lint, types, the site, tests and doctests. ``--fast`` leaves out
the slow tests, ``--only tests`` the rest. ``--second`` is for the run with TransformerLens 4 that
follows one with 3: it leaves out tests that neither version can change (:data:`ONCE`)."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

ONCE = (
    # arithmetic on tensors
    *("base", "measures", "sphere", "scores/test_sums.py", "scores/test_offsets_by_hand.py"),
    *("scores/test_splits_by_hand.py", "scores/test_tables_by_hand.py"),
    *("decomposition/test_accumulation.py", "decomposition/test_layer_intervals.py"),
    *("decomposition/test_position_context.py", "decomposition/test_process_group.py"),
    *("decomposition/test_sums.py", "flow/test_bases.py", "flow/test_by_hand.py"),
    *("flow/test_classifiers_and_paths.py", "flow/test_langevin.py", "flow/test_limits.py"),
    *("flow/test_reports_by_hand.py", "weights/test_bilinear.py", "weights/test_by_hand.py"),
    *("weights/test_limits_of_fits.py", "weights/test_readout.py"),
    # texts, files, pages and sentences, made of results
    *("corpus", "papers", "render", "circuits/test_circuit_tracer.py"),
    *("circuits/test_composition_files.py", "circuits/test_graph_files.py"),
    *("cli/test_arguments.py", "cli/test_files.py", "cli/test_options.py"),
    *("report/test_article.py", "report/test_basis_texts.py", "report/test_by_hand.py"),
    *("report/test_finding_texts.py", "report/test_findings.py", "report/test_findings_limits.py"),
    *("report/test_head_texts.py", "report/test_origin.py", "report/test_page.py"),
    *("report/test_report_steps.py", "report/test_section_texts.py", "report/test_sizes.py"),
    # the project and its benchmarks
    *("project/test_benchmarks.py", "project/test_calibration.py", "project/test_contributing.py"),
    *("project/test_dataclasses.py", "project/test_defaults.py", "project/test_docs.py"),
    *("project/test_docstrings.py", "project/test_import_direction.py"),
    *("project/test_known.py", "project/test_model_is_hidden.py", "project/test_mutate.py"),
    *("project/test_second_run.py", "project/test_shape_checks.py", "project/test_site_links.py"),
    *("project/test_skips.py", "project/test_types.py", "project/test_versions.py"),
    # processes that are killed, and intervals of simulated numbers
    "decomposition/test_distributed.py::test_torchrun_two_and_four_processes_and_one_that_dies",
    "decomposition/test_streaming.py::test_twenty_kills_lose_nothing",
    "decomposition/test_groups.py::test_intervals_cover_where_windows_come_in_topics",
    "circuits/test_pruned_runs.py::test_intervals_of_ratios_cover",
    # the slowest tests of SmolLM2: notebooks 07 to 09 make the same calls on it in both
    # generations, and the sections of a report run on the embedded model
    *("circuits/test_edges_smollm2.py", "interventions/test_knockouts_smollm2.py"),
    "interventions/test_edges.py::test_one_edge_carries_induction_in_smollm2",
    *("project/test_examples.py::test_the_rotary_recipe_runs_on_smollm2", "report/test_smollm2.py"),
    # the notebooks and pages make the calls of the gallery's scripts in both generations
    "project/test_examples.py::test_the_scripts_of_the_gallery_run",
    # in both generations, shorter prompts run in blocks and are compared with whole ones
    "scores/test_long_prompts.py::test_memory_grows_with_the_length_of_a_prompt",
)
"""Files, and tests of files, that the second run leaves out, because no generation of
TransformerLens can change what they test, or because others test it there on a smaller scale. A
file stays in it when what it tests takes a model of that generation, or reads its hooks, caches,
weights or configuration; a result of a small model that is only written, drawn or put into words is
no such thing."""


def main() -> int:
    """Run each check, all of them even when one fails, and return the number that failed."""
    parser = argparse.ArgumentParser(prog="python -m tests", description=__doc__)
    parser.add_argument("--fast", action="store_true", help="leave out the slow tests")
    names = ("format", "lint", "types", "docs", "tests")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="some checks")
    parser.add_argument("--second", action="store_true", help="leave out what runs once")
    parser.add_argument("--part", help="K/N: every Nth test file, from the Kth on")
    parser.add_argument("--workers", default=str(os.cpu_count() or 1), help="test processes")
    arguments = parser.parse_args()
    python = [sys.executable, "-m"]
    selection = ["-m", "not slow"] if arguments.fast else []
    if arguments.part:
        selection += ["--part", arguments.part]
    if arguments.second:
        selection += [f"--{'deselect' if '::' in x else 'ignore'}=tests/{x}" for x in ONCE]
    checks = {
        "format": [*python, "ruff", "format", "--check", "."],
        "lint": [*python, "ruff", "check", "."],
        "types": [*python, "pyright"],
        "docs": [*python, "sphinx", "-q", "-W", "--keep-going", "docs", "docs/_build/html"],
        "tests": [
            *python,
            "pytest",
            "-q",
            "-n",
            arguments.workers,
            "--dist",
            "loadfile",
            # in the order of tests/conftest.py, and not by the number of tests
            "--no-loadscope-reorder",
            "--durations",
            "15",
            *selection,
        ],
    }
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # each of some hundred processes would compile again
    }

    def passes(name: str) -> bool:
        started = time.monotonic()
        code = subprocess.run(checks[name], cwd=ROOT, env=environment, check=False).returncode
        said = "ok" if code == 0 else f"FAILED ({code})"
        sys.stdout.write(f"{name}: {said} in {time.monotonic() - started:.0f} s\n")
        sys.stdout.flush()
        return code == 0

    chosen = [name for name in checks if name in arguments.only]
    # types and the site take a minute of one core each: beside each other, and before the tests,
    # which use all cores
    before_tests = [name for name in chosen if name != "tests"]
    with ThreadPoolExecutor(max_workers=2) as pool:
        passed = [*pool.map(passes, before_tests), *map(passes, chosen[len(before_tests) :])]
    return passed.count(False)


if __name__ == "__main__":
    sys.exit(main())
