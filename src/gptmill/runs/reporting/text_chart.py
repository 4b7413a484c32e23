"""A curve drawn in Braille dots, for terminals and Markdown."""

from __future__ import annotations

DOT_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
BLANK = 0x2800

Points = list[tuple[float, float]]


def draw_chart(curve: Points, marks: Points, width: int = 60, height: int = 12) -> str:
    """Draws `curve` in Braille dots, each character a grid of 2 x 4, and `marks` as circles, with the axes' ranges."""
    xs, ys = zip(*curve, *marks, strict=True)
    x_low, x_high, y_low, y_high = min(xs), max(xs), min(ys), max(ys)
    x_span, y_span = (x_high - x_low) or 1.0, (y_high - y_low) or 1.0
    cells = [[BLANK] * width for _ in range(height)]
    for x, y in curve:
        column = round((x - x_low) / x_span * (2 * width - 1))
        row = round((y_high - y) / y_span * (4 * height - 1))
        cells[row // 4][column // 2] |= DOT_BITS[column % 2][row % 4]
    for x, y in marks:
        cells[round((y_high - y) / y_span * (height - 1))][round((x - x_low) / x_span * (width - 1))] = ord("o")
    labels = [""] * height
    labels[0], labels[-1] = f"{y_high:.3f}", f"{y_low:.3f}"
    margin = max(len(label) for label in labels)
    lines = [
        f"{label:>{margin}} ┤{''.join(chr(cell) if cell != BLANK else ' ' for cell in row)}"
        for label, row in zip(labels, cells, strict=True)
    ]
    axis = f"{x_low:,.0f}".ljust(width - len(f"{x_high:,.0f}")) + f"{x_high:,.0f}"
    return "\n".join([*lines, f"{'':>{margin}} └{'─' * width}", f"{'':>{margin}}  {axis}"])
