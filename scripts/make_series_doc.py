"""Writes docs/reference/series.md from the table of series; a test compares the two."""

from __future__ import annotations

from pathlib import Path

from asyncrl.tracking.series import AXES, CAUSES, SECTIONS, SERIES

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "series.md"

HEAD = """# Series

Everything that a run measures. A name with a `{placeholder}` is a family: one series per reason, bucket, cause, role.
Of several actors' values the sum, mean, maximum or the latest is recorded, as the last column says. A total counts
since the start of the run, restarts included; its rate is the series `..._per_s`.

Staleness buckets are `0 1 2 3 4_7 8_15 16_up` training steps.

This page is written by `python scripts/make_series_doc.py`; the table is `asyncrl/tracking/series.py`.
"""


def page() -> str:
    parts = [HEAD, "\n## Axes\n\n| axis | meaning |\n| --- | --- |\n"]
    parts += [f"| `{name}` | {meaning} |\n" for name, meaning in AXES.items()]
    for section, about in SECTIONS.items():
        parts.append(f"\n## {section}\n\n{about}.\n\n")
        parts.append("| series | unit | meaning | of several |\n| --- | --- | --- | --- |\n")
        for series in SERIES.values():
            if series.section == section:
                meaning = series.meaning.replace("|", "\\|")
                parts.append(f"| `{series.name}` | {series.unit} | {meaning} | {series.across} |\n")
    parts.append("\n## Causes of waiting\n\n| cause | who: what for |\n| --- | --- |\n")
    parts += [f"| `{cause}` | {meaning} |\n" for cause, meaning in CAUSES.items()]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
