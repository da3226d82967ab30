"""Profiles: cluster files with measured constants and their origin."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from ._describe import described
from .calibrate import Calibration, Sample

_HEAD = """\
# Constants measured by `planner calibrate`, laid over those that the catalog has for this kind.
# Use it as a cluster: --cluster {name}, or --profile {name} with --cluster for another size.
"""


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of a profile: device and host names, date, versions; ``noise`` and ``left_out`` as
    in `Sampled`."""

    device_name: str
    host_name: str
    date: str
    versions: Mapping[str, str]
    rounds: int
    noise: float
    left_out: tuple[str, ...] = ()


def profile_text(
    cluster: str,
    calibration: Calibration,
    origin: Origin,
    name: str,
    samples: Iterable[Sample] = (),
) -> str:
    """The text of a profile.

    Args:
        cluster: cluster text of the measured cluster.
        calibration: its constants and residuals.
        origin: their origin.
        name: name of the file, for its first lines.
        samples: the measured programs, whose seconds are listed.
    """
    given = described(cluster)
    lines = [
        _HEAD.format(name=name),
        "[cluster]",
        f"device = {_text(given.entry['device']['kind'])}",
    ]
    if "torus" in given.entry:
        lines += [f"shape = {list(given.shape)}", f"slices = {given.slices}"]
    else:
        lines += [f"devices_per_node = {given.shape[0]}", f"nodes = {given.shape[1]}"]
    lines += ["", "[profile]"]
    fields = dataclasses.asdict(origin)
    fields |= fields.pop("versions")
    fields["noise"] = float(f"{origin.noise:.3f}")
    fields["left_out"] = list(origin.left_out)
    fields["kept"] = list(calibration.kept)
    lines += [f"{key} = {_value(value)}" for key, value in fields.items()]
    for r in calibration.residuals:
        lines += [
            "",
            "[[profile.residuals]]  # |predicted / measured - 1|",
            f"kind = {_text(r.kind)}",
            f"samples = {r.samples}",
            f"ratio = {r.ratio:.3f}",
            f"median = {r.median:.3f}",
            f"worst = {r.worst:.3f}",
            f"worst_name = {_text(r.worst_name)}",
        ]
    measured = {f"{s.kind} {s.name}": float(f"{s.seconds:.4g}") for s in samples}
    if measured:
        lines += ["", "[profile.seconds]"]
        lines += [f"{_text(key)} = {value!r}" for key, value in measured.items()]
    for table, values in calibration.tables().items():
        lines += ["", f"[{table}]", *(f"{key} = {value!r}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return _text(value) if isinstance(value, str) else repr(value)


def _text(value: str) -> str:
    """A TOML basic string; unprintable characters become spaces."""
    plain = "".join(c if c.isprintable() else " " for c in value)
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'
