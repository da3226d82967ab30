"""``planner checkpoint``: works on saved states, on one machine and without devices."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shtab
from rich.console import RenderableType
from rich.text import Text

from costmodels import ClusterError, parse_bytes
from planner.announce import announced
from planner.cli.commands import Command, print_parts, stay_on_cpu
from planner.errors import RequestError
from planner.report.layout import add_row, new_table, pairs, section
from planner.report.units import bytes_text

if TYPE_CHECKING:
    from executor.checkpoint.saved import Saved

DONE = 0
MAX_SHARD = "5GB"
DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")

_SOURCES = """\
a state is a folder of checkpoints by step, one step's folder, a folder that Orbax wrote, a
.safetensors file, its .index.json, or a folder of these
"""

_INFO = f"""\
{_SOURCES}
examples:
  planner checkpoint info run
  planner checkpoint info run --step 300
"""

_VERIFY = f"""\
{_SOURCES}
examples:
  planner checkpoint verify run
  planner checkpoint verify run --step 300
  planner checkpoint verify weights.safetensors

Every file is read and compared with the CRC-32 that was written with it. The exit code is 0 if all
match, and 2 if a file is damaged or missing, or if there are no checksums.
"""

_CONVERT = f"""\
{_SOURCES}
examples:
  planner checkpoint convert run weights --params-only --dtype bfloat16
  planner checkpoint convert weights.safetensors run --separator .

Leaves are named by the keys to them. A key's own ~ is written ~0, and the separator in it ~1, so
that names are taken apart as they were joined. Memory holds some parts of leaves, of 64 MB or one
shard.
"""

_MERGE = f"""\
{_SOURCES}
examples:
  planner checkpoint merge run1:params run2:opt merged
  planner checkpoint merge base.safetensors adapters.safetensors all.safetensors
"""


def add_checkpoint(commands: Any, text: str) -> None:
    """Add the subcommand to ``argparse``'s subparsers."""
    parser = commands.add_parser(
        "checkpoint",
        help=text,
        description="Look at checkpoints, verify, convert and merge them; no devices are needed.",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    _add_info(verbs)
    _add_verify(verbs)
    _add_convert(verbs)
    _add_merge(verbs)


def run_checkpoint(options: argparse.Namespace) -> int:
    """Run the chosen verb; raises RequestError."""
    stay_on_cpu()
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # damage in several leaves at once
    with announced("reading"):
        parts = _VERBS[options.verb](options)
    print_parts(parts, options.no_color)
    return DONE


def _parser(verbs: Any, name: str, text: str, more: str) -> Any:
    parser = verbs.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--no-color", action="store_true", help="plain text")
    return parser


def _add_info(verbs: Any) -> None:
    parser = _parser(verbs, "info", "say what is in a saved state", _INFO)
    parser.add_argument("state", type=Path, metavar="STATE", help="see below").complete = shtab.FILE
    parser.add_argument("--step", type=int, metavar="N", help="default: the latest")
    _separator(parser)


def _add_verify(verbs: Any) -> None:
    parser = _parser(verbs, "verify", "compare files with their checksums", _VERIFY)
    parser.add_argument("state", type=Path, metavar="STATE", help="see below").complete = shtab.FILE
    parser.add_argument("--step", type=int, metavar="N", help="default: all steps of a run")


def _add_convert(verbs: Any) -> None:
    parser = _parser(verbs, "convert", "write a saved state in another form", _CONVERT)
    add = parser.add_argument
    add("source", type=Path, metavar="STATE", help="see below").complete = shtab.FILE
    add("to", type=Path, metavar="OUT", help="must not be there yet").complete = shtab.FILE
    add("--step", type=int, metavar="N", help="default: the latest")
    add("--params-only", action="store_true", help="the leaves below params; --only params")
    add(
        "--only",
        action="append",
        default=[],
        metavar="PATH",
        help="the leaves below this path, such as params/layers; may be repeated",
    )
    add("--dtype", choices=DTYPES, metavar="TYPE", help=f"round floats to {', '.join(DTYPES)}")
    _out_options(parser, "default: the other one; safetensors if OUT ends so")


def _add_merge(verbs: Any) -> None:
    parser = _parser(verbs, "merge", "put the leaves of several saved states into one", _MERGE)
    add = parser.add_argument
    add(
        "states",
        nargs="+",
        metavar="STATE[:PATH]",
        help="see below; of each all leaves, or those below a path",
    ).complete = shtab.FILE
    add("to", type=Path, metavar="OUT", help="must not be there yet").complete = shtab.FILE
    _out_options(parser, "default: that of the first; safetensors if OUT ends so")


def _separator(parser: Any) -> None:
    parser.add_argument(
        "--separator",
        metavar="TEXT",
        help="what joins keys in the names of safetensors (default: what the file says, else /)",
    )


def _out_options(parser: Any, default: str) -> None:
    parser.add_argument(
        "--to",
        dest="form",
        choices=("orbax", "safetensors"),
        help=default,
    )
    parser.add_argument(
        "--max-shard-size",
        default=MAX_SHARD,
        metavar="SIZE",
        help=f"above this safetensors are split into files, with an index (default: {MAX_SHARD})",
    )
    _separator(parser)


def _info(options: argparse.Namespace) -> list[RenderableType]:
    from executor.checkpoint.common import path_text
    from executor.checkpoint.saved import open_state

    saved = open_state(options.state, options.step, options.separator)
    total = sum(x.nbytes for x in saved.leaves.values())
    head = [("leaves", f"{len(saved.leaves)}, {bytes_text(total)}")]
    head.append(("on disk", bytes_text(_on_disk(saved.where))))
    if saved.step is not None:
        head.insert(0, ("step", str(saved.step)))
    if saved.plan is not None:
        head.append(("plan", f"mesh {saved.plan.mesh}, digest {saved.plan.digest[:16]}"))
    if saved.owner:
        head.append(("owner", saved.owner))
    if saved.extra is not None:
        head.append(("extra", json.dumps(saved.extra)))
    parts: list[RenderableType] = [Text(str(saved.where), style="bold"), pairs(head)]
    if saved.steps:
        steps = new_table(">step", ">on disk")
        for step in saved.steps:
            add_row(steps, str(step), bytes_text(_on_disk(saved.where.parent / str(step))))
        parts += section("steps", steps)
    leaves = new_table("leaf", "type", "shape", ">bytes")
    for path, leaf in saved.leaves.items():
        shape = ",".join(map(str, leaf.shape))
        add_row(leaves, path_text(path), leaf.dtype.name, f"[{shape}]", bytes_text(leaf.nbytes))
    return [*parts, *section("leaves", leaves)]


def _verify(options: argparse.Namespace) -> list[RenderableType]:
    from executor.checkpoint.saved import verify_saved

    parts: list[RenderableType] = []
    for where, files, size, others in verify_saved(options.state, options.step):
        parts.append(Text(f"{where}: {files} files, {bytes_text(size)}, no damage"))
        if others:
            parts.append(Text(f"  without a checksum: {', '.join(others)}"))
    return parts


def _convert(options: argparse.Namespace) -> list[RenderableType]:
    import jax.numpy as jnp

    from executor.checkpoint.common import taken
    from executor.checkpoint.saved import cast, only, open_state

    saved = open_state(options.source, options.step, options.separator)
    prefixes = [taken(text) for text in options.only] + [("params",)] * options.params_only
    if prefixes:
        saved = only(saved, prefixes)
    if options.dtype is not None:
        saved = cast(saved, jnp.dtype(options.dtype))
    other = "safetensors" if saved.form == "orbax" else "orbax"
    return _write(saved, options, other)


def _merge(options: argparse.Namespace) -> list[RenderableType]:
    from executor.checkpoint.common import taken
    from executor.checkpoint.saved import merged, only, open_state

    states = []
    for text in options.states:
        name, _, prefix = text.rpartition(":")
        if not name or Path(text).exists():
            name, prefix = text, ""
        saved = open_state(Path(name), None, options.separator)
        states.append(only(saved, [taken(prefix)]) if prefix else saved)
    return _write(merged(states), options, states[0].form)


def _write(saved: Saved, options: argparse.Namespace, form: str) -> list[RenderableType]:
    from executor.checkpoint.saved import write_state

    logging.getLogger("absl").setLevel(logging.CRITICAL)  # it logs the traceback of every thread
    if options.to.name.endswith(".safetensors"):
        form = "safetensors"
    try:
        limit = parse_bytes(options.max_shard_size)
    except ClusterError as error:
        raise RequestError(f"--max-shard-size: {error}") from error
    written = write_state(
        saved,
        options.to,
        form=options.form or form,
        separator=options.separator or "/",
        max_bytes=limit,
    )
    total = sum(x.nbytes for x in saved.leaves.values())
    listing = "\n".join(f"  {path}" for path in written)
    return [Text(f"wrote {len(saved.leaves)} leaves, {bytes_text(total)}\n{listing}")]


def _on_disk(where: Path) -> int:
    """Bytes of a folder or file."""
    if where.is_file():
        return where.stat().st_size
    return sum(x.stat().st_size for x in where.rglob("*") if x.is_file())


_VERBS = {"info": _info, "verify": _verify, "convert": _convert, "merge": _merge}

CHECKPOINT = Command("checkpoint", add_checkpoint, run_checkpoint)
