"""The subcommands by name, without their modules: printing help imports none of these."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.cli.commands import Command


@dataclass(frozen=True)
class Entry:
    """A subcommand before it is loaded; ``where``: ``module:ATTRIBUTE`` of its ``Command``."""

    name: str
    help: str
    where: str

    def load(self) -> Command:
        """Import the subcommand."""
        module, _, attribute = self.where.partition(":")
        command: Command = getattr(importlib.import_module(module), attribute)
        return command


PLANNER = (
    Entry(
        "inspect",
        "plan a step and print the plan; runs nothing on devices",
        "planner.cli.steps.inspect:INSPECT",
    ),
    Entry(
        "compare",
        "the chosen plan beside manual ones, or two saved plans",
        "planner.cli.steps.compare:COMPARE",
    ),
    Entry(
        "fit",
        "the smallest cluster of each kind of device that a step fits on",
        "planner.cli.steps.fit:FIT",
    ),
    Entry("diff", "what differs between two saved plans, in words", "planner.cli.steps.diff:DIFF"),
    Entry(
        "check",
        "plan a step again and compare it with a saved plan, for pull requests",
        "planner.cli.steps.diff:CHECK",
    ),
    Entry(
        "explain",
        "say why a value is sharded as it is, and what else it could cost",
        "planner.cli.steps.explain:EXPLAIN",
    ),
    Entry(
        "search",
        "run a search on a bare problem (IOPDDL form); knows nothing of models",
        "planner.cli.search:SEARCH",
    ),
    Entry("debug", "print what a stage of planning made", "planner.cli.steps.debug:DEBUG"),
)
"""Subcommands that need no devices."""

EXECUTOR = (
    Entry(
        "verify",
        "compare a plan's predictions with what compilers make of the step",
        "executor.cli.verify:VERIFY",
    ),
    Entry(
        "calibrate",
        "measure the devices present and write the cost model's constants",
        "executor.cli.calibrate:CALIBRATE",
    ),
    Entry(
        "profile",
        "measured times of a traced run beside its plan",
        "executor.profile.command:PROFILE",
    ),
    Entry(
        "launch",
        "run a script in several processes, on this host or on many",
        "executor.cli.launch:LAUNCH",
    ),
    Entry(
        "export",
        "write a plan as code for projects that do not use meshwright",
        "executor.cli.export:EXPORT",
    ),
    Entry(
        "checkpoint",
        "list checkpoints, verify, convert and merge them, in and out of safetensors",
        "executor.cli.checkpoint:CHECKPOINT",
    ),
)
"""Subcommands that need a compiler, devices or the executor."""

EXAMPLES = """\
examples:
  planner inspect train.py                          plan the step that the script parallelizes
  planner inspect train.py --cluster h100:8x4       the same for four nodes of eight H100
  planner inspect model.py:train_step --mesh data=4,model=2
  planner inspect model.py --memory 16GB --save plan.json
  planner inspect model.py --cluster v5p:4x4x8 --json > plan.json
  planner inspect train.py --cluster v5e:8 --confirm tpu   compile the best plans, take the best
  planner inspect train.py --html report.html       a page with the step drawn over time
  planner inspect train.py -- --layers 4            what follows -- is for the script
  planner inspect model.py --placement auto         which tables to put on parameter servers
  planner inspect model.py --placement embed=ps,head=ps_whole
  planner explain train.py "['up']['kernel']"       why it is sharded so, and what else would cost
  planner compare train.py --cluster h100:8x4       beside data parallel, FSDP, tensor parallel, ...
  planner compare train.py --cluster h100:8x4 --cluster v5p:4x4x4 --batch 256,512
  planner fit train.py                              the smallest cluster of each kind it fits on
  planner diff before.json after.json               two saved plans in words
  planner check plan.json train.py                  does the step still get that plan?
  planner search problem.json.gz --out choice.json  run a search on a bare problem
  planner debug train.py --stage solution           what a stage of planning made

MODEL is a Python file that is one of
  a script that calls a function wrapped in executor.parallelize; it is run up to that call
  a file with train_step (or FUNCTION) and example_args(), the tuple of its arguments
  a file with loss(params, *batch), example_params(), example_batch() and optimizer, an optax
  transformation (or MODEL.py:FUNCTION, another loss of that file)
  a file with a Flax model (model, or make_model()) and example_inputs(); a loss(outputs,
  inputs) is optional
--placement needs one of the last two

exit codes: 0 planned, 2 the request can't be met, 3 the model itself failed
"""
