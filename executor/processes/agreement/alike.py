"""Checks that all processes of a job run alike: their settings, program, state and data.

A program over several processes is one program only if each process runs it alike. Differences lead
to wrong numbers or to a hang, so they are checked first: hashes go to process 0, which answers
which processes differ and in what, and all processes raise the same error.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from executor.processes.agreement.fingerprints import Fingerprint, arguments, hash_of, program
from executor.processes.agreement.settings import settings
from executor.processes.meet import ProcessMismatchError, meet
from planner import compat
from planner.graph.trace import abstract

Parts = Mapping[str, Sequence[Fingerprint]]
MOST = 3
"""Maximum number of differences named for one process."""
NAMED = 8
"""Maximum number of differences named for all processes."""
ADVICE = {
    "settings": "start every process with the same packages, settings, variables and devices",
    "program": "run the same script with the same arguments everywhere; what a process draws or "
    "reads for itself must not reach the step",
    "state": "what several processes hold must be equal: use the same seed everywhere or restore a "
    "checkpoint, and pass whole batches or those of executor.shard",
    "data": "give every process the same source, seed and options; each reads its own rows",
    "train": "call train with the same options everywhere",
}
_settings_compared = False


def compare_parts(name: str, parts: Parts) -> None:
    """Compare parts, each an ordered list of entries, between all processes.

    Args:
        name: what this process is about to do; an error names it if other processes do something
            else.
        parts: the lists by part name. An entry without a value is not compared.

    Raises:
        ProcessMismatchError: in all processes; names up to MOST differences of each process.
        HostError: a process did not arrive.
    """
    if jax.process_count() == 1:
        return
    hashes = {part: [_short(entry) for entry in entries] for part, entries in parts.items()}
    totals = {
        part: digests if "" in digests else [hash_of(" ".join(digests))]
        for part, digests in hashes.items()
    }
    if not meet(name, totals, _differences):
        return
    where = meet(f"{name}, compared", hashes, _differences)
    if not where:  # one process has parts that another lacks, such as those of a stage
        return
    texts = {
        part: {k: parts[part][int(k)].text if int(k) < len(parts[part]) else "nothing" for k in ks}
        for part, ks in _asked(where).items()
    }
    shown = {"host": socket.gethostname(), "has": texts}
    text = meet(f"{name}, named", shown, lambda reports: _named(where, reports))
    raise ProcessMismatchError(f"processes differ: {text}")


def _short(entry: Fingerprint) -> str:
    return hash_of(entry.value)[:16] if entry.value else ""


Differences = list[tuple[str, int, int, int]]
"""Part, entry, process, and the process that it differs from."""


def _differences(reports: list[dict[str, list[str]]]) -> Differences:
    """Entries that differ from those of most processes (on a tie, from the first's)."""
    differences: Differences = []
    for part in reports[0]:
        lists = [values.get(part, []) for values in reports]
        named: Counter[int] = Counter()
        for k in range(max(map(len, lists))):
            column = [x[k] if k < len(x) else "-" for x in lists]
            counts = Counter(x for x in column if x)
            if len(counts) < 2:
                continue
            usual = counts.most_common(1)[0][0]
            for process, x in enumerate(column):
                if x not in ("", usual) and named[process] < (1 if part == "program" else MOST):
                    named[process] += 1
                    differences.append((part, k, process, column.index(usual)))
    return differences


def _asked(where: Differences) -> dict[str, list[str]]:
    return {part: sorted({str(k) for p, k, _, _ in where if p == part}) for part, *_ in where}


def _named(where: Differences, reports: list[dict[str, Any]]) -> str:
    texts = []
    for part, k, process, first in where[:NAMED]:
        has, other = (reports[p]["has"][part][str(k)] for p in (process, first))
        texts.append(
            f"process {process} ({reports[process]['host']}) has {has}, "
            f"process {first} ({reports[first]['host']}) has {other}"
        )
    if len(where) > NAMED:
        texts.append(f"{len(where) - NAMED} differences more")
    advice = dict.fromkeys(ADVICE[part] for part, *_ in where if part in ADVICE)
    return "; ".join([*texts, *advice])


def compare_settings() -> None:
    """Compare versions, settings and devices, once per job.

    Raises:
        ProcessMismatchError: as for ``compare_parts``.
    """
    global _settings_compared
    if jax.process_count() > 1 and not _settings_compared:
        compare_parts("starting", {"settings": settings()})
        _settings_compared = True


def compare_program(function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Compare settings and the traced step, with its literals and constants, before it is planned.

    Args:
        function: the step.
        args: its arguments, arrays or ShapeDtypeStructs.

    Raises:
        ProcessMismatchError: as for ``compare_parts``.
    """
    if jax.process_count() == 1:
        return
    compare_settings()
    name = getattr(function, "__name__", "the step")
    try:
        jaxpr, _ = compat.make_jaxpr(function, abstract(args))
    except Exception:  # planning traces again and reports the error
        return
    compare_parts(f"planning {name}", {"program": program(jaxpr)})


def compare_arguments(name: str, args: Any, shardings: Any, whole: Callable[[int], bool]) -> None:
    """Compare the first arguments of a step, before they are put on the devices.

    Args:
        name: name of the step.
        args, shardings, whole: as for ``fingerprints.arguments``.

    Raises:
        ProcessMismatchError: as for ``compare_parts``.
    """
    if jax.process_count() > 1:
        compare_parts(f"first call of {name}", {"state": arguments(args, shardings, whole)})
