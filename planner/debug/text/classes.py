"""The classes of equal groups as text."""

from __future__ import annotations

from planner.debug.text.analysis import buffer_lines
from planner.debug.text.items import group_text, link_text, ranges
from planner.step.classes import Quotient


def classes_text(quotient: Quotient) -> str:
    """Classes with their members, the links between them, the moments that can be the peak, and the
    buffers; one line per item."""
    part, whole = quotient.part, quotient.whole
    members: list[list[int]] = [[] for _ in part.groups.groups]
    for member, color in enumerate(quotient.color):
        members[color].append(member)
    lines = [
        f"classes: {len(part.groups.groups)} of {len(whole.groups.groups)} groups, "
        f"{len(part.groups.links)} of {len(whole.groups.links)} links, "
        f"{len(part.buffers)} of {len(whole.buffers)} buffers"
    ]
    for group, count, groups in zip(part.groups.groups, part.counts, members, strict=True):
        lines.append(f"  class {group_text(group, count)}; groups {ranges(groups)}")
    for link, bundle in zip(part.groups.links, part.bundles, strict=True):
        edge = f"edge {bundle}" if bundle >= 0 else "no edge"
        lines.append(f"  link {link_text(link, part.graph)}; {edge}")
    at = ranges(quotient.moments)
    lines.append(f"  {len(quotient.moments)} moments, at operations {at}")
    lines += buffer_lines(part.buffers, "class", quotient.moments)
    return "\n".join(lines)
