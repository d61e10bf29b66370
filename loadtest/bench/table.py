"""Tables for people: plain text, columns aligned."""

from __future__ import annotations

from collections.abc import Sequence


def to_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lay out rows below a header; the first column is words, the others are numbers or short words, to the right."""
    lines = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join("  ".join(_aligned(line, widths)).rstrip() for line in lines)


def _aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *others = zip(line, widths, strict=True)
    return [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]


def _cell(value: object) -> str:
    """None is a dash; numbers get as many decimals as their size is worth."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"
    return str(value)
