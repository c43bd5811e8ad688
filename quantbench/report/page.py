"""Writes the report of a run: one self-contained HTML page."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

from quantbench import __version__
from quantbench.analysis.check import check_run
from quantbench.analysis.curves import curves_of
from quantbench.analysis.neighbours import rows_by_dtype
from quantbench.analysis.summary import (
    LayerRow,
    Point,
    are_parts,
    floor_lines,
    layer_rows,
    points_of,
)
from quantbench.errors import StoreError, printable
from quantbench.files import write_file
from quantbench.report.content import Card, Section
from quantbench.report.lead import Lead, lead_of
from quantbench.report.op_curves import axis_section, losses_card
from quantbench.report.overview import maps_section, state_section
from quantbench.report.sections import (
    facts_of,
    how_section,
    period_words,
    rules_section,
    sizes_section,
    steps_section,
    trust_section,
)
from quantbench.report.shape_comparison import (
    compare_shapes,
    comparison_section,
    comparison_sentence,
)
from quantbench.report.source import dashed, picture_caption, points_where
from quantbench.report.sweep_result import ops_line
from quantbench.store.folder import Run
from quantbench.sweep.axes import SHAPE_DIM
from quantbench.sweep.options import options_from_json

PAGE = "report.html"
# Families of curves whose steps are explained on the first screen; the section on steps explains
# all.
_MOST_EXPLAINED = 2


@dataclass(frozen=True)
class Page:
    """The content of a report page.

    banners: (kind, title, text) of each warning at the top; kind is imported, simulated or warning.
    facts: (name, value) pairs for the foot of the page.
    lead: the first screen; None if nothing was measured.
    explanation: causes of the steps and the floor of short times, or "".
    origin: text after "Made by quantbench" in the last line.
    """

    title: str
    subtitle: str
    banners: Sequence[tuple[str, str, str]]
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    lead: Lead | None = None
    lead_card: Card | None = None
    explanation: str = ""
    origin: str = ""


@dataclass(frozen=True)
class Written:
    """Path of the written HTML file, and the first screen (see `Page`)."""

    page: Path
    lead: Lead | None


def write_report(run: Run, output: Path, where: Mapping[str, int] | None = None) -> Written:
    """Writes the page of a run.

    output: see `write_page`.
    where: axis values; only points at these values are shown. Causes and rules still use the whole
        run.
    Raises StoreError if the page cannot be written, InputError if the run has no such point.
    """
    shown = points_where(points_of(run.records, run.info.device), where or {})
    return write_page(output, build_page(run, shown, where or {}))


def write_page(output: Path, page: Page) -> Written:
    """Writes the HTML file in one step.

    output: a file name that ends in .html or .htm, or a folder for report.html, created if needed.
    Raises StoreError if the page cannot be written.
    """
    alone = output.suffix.lower() in (".html", ".htm") and not os.path.isdir(output)
    path = output if alone else output / PAGE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            "report", f"{path.parent} ({error.strerror})", "a folder that can be written"
        ) from None
    write_file("report", path, render(page))
    return Written(path, page.lead)


def build_page(run: Run, points: Sequence[Point], where: Mapping[str, int]) -> Page:
    """Builds the page for some points of a run, selected by `where`."""
    info, spec = run.info, run.info.device
    caption = partial(picture_caption, info)
    axes = list(
        dict.fromkeys(
            name for point in points for name in point.axes if name not in (*where, SHAPE_DIM)
        )
    )
    rows = rows_by_dtype(points)
    layers = layer_rows(points) if are_parts(points) else rows
    sections: list[Section | None] = []
    models = options_from_json(info.options).models if info.options.get("models") else ()
    lead, lead_card = None, None
    if models and points:
        comparison = compare_shapes(points, models)
        lead = Lead(SHAPE_DIM, comparison_sentence(comparison))
        sections.append(comparison_section(comparison))
    explanation, all_sizes = "", None
    if points and axes:
        check = check_run(run, points=None if where else points)
        lead = replace(lead_of(layers, axes, check), ops=ops_line(layers))
        explanation = ". ".join(
            [
                *map(period_words, check.periods[:_MOST_EXPLAINED]),
                *floor_lines((p.latency_us, p) for p in points),
            ]
        )
        curves = {
            axis: curves_of(points, axis) if where else check.curves.get(axis, ()) for axis in axes
        }
        ordered = sorted(axes, key=lambda axis: axis != lead.axis)
        sections += [axis_section(axis, curves[axis], check, caption) for axis in ordered]
        sections += [
            steps_section(check),
            maps_section(layers, axes, caption),
            rules_section(check.rules, spec),
        ]
        if not lead.several:  # the table is of one shape or a few
            lead_card = losses_card(layers, lead.bad, lead.axis, caption(points))
        all_sizes = sizes_section(rows, check)
    sections += [
        state_section(run.records, info.origin, caption(points)),
        trust_section(run),
        all_sizes,
    ]
    sections.append(how_section(run))
    title = ", ".join(map(dashed, axes)) or "shapes side by side" if points else "no point measured"
    held = ", ".join(f"{dashed(name)} = {value}" for name, value in where.items())
    return Page(
        title=f"{spec.name}: {title}" + (f" at {held}" if held else ""),
        subtitle=_subtitle(run, rows),
        banners=_banners(run, points),
        facts=facts_of(run),
        lead=lead,
        lead_card=lead_card,
        explanation=explanation,
        sections=[section for section in sections if section is not None],
        origin=f" from {printable(str(run.folder))}",
    )


def _subtitle(run: Run, rows: Sequence[LayerRow]) -> str:
    info = run.info
    words = {
        "measured": "measured on this device",
        "imported": "imported",
        "simulated": "simulated",
    }[info.origin]
    providers = ", ".join(dict.fromkeys(row.provider for row in rows))
    dtypes = ", ".join(dict.fromkeys(row.points[0].workload.dtype for row in rows))
    parts = [info.run_id, words, providers, dtypes, info.started]
    return printable(" · ".join(part for part in parts if part), 300)


def _banners(run: Run, points: Sequence[Point]) -> list[tuple[str, str, str]]:
    """Returns the warnings for the top of the page, as (kind, title, text)."""
    info = run.info
    origins = {info.origin, *(record.origin for record in run.records)}
    found = []
    if "simulated" in origins:
        found.append(
            ("simulated", "SIMULATED", "These figures come from a simulation, not from a device.")
        )
    if "imported" in origins:
        source = printable(
            info.source or next((r.source for r in run.records if r.source), ""), 240
        )
        found.append(("imported", "IMPORTED", f"Measured by others, not on this machine: {source}"))
    if info.how_ended == "budget":
        left = "Points that it did not reach are missing, and places without all of their ops are not weighed"
        found.append(
            ("warning", "STOPPED BY ITS BUDGET", f"{left}: sweep --resume measures the rest.")
        )
    elif info.how_ended != "complete":
        found.append(
            ("warning", "NOT FINISHED", f"This run is {info.how_ended}; what it has is shown.")
        )
    if not points:
        found.append(
            (
                "warning",
                "NOTHING MEASURED",
                "No point of this run has a figure; the reasons are below.",
            )
        )
    return found + [("warning", "NOTE", printable(warning)) for warning in run.warnings]


def render(page: Page) -> str:
    """Renders the page as HTML. Escapes every text; an undefined name in the template raises an
    error.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("quantbench.report"),
        autoescape=True,
        finalize=_fit_to_show,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = ""
    cards = [card for section in page.sections for card in section.cards]
    if page.lead_card is not None or any(card.chart for card in cards):
        # The page's policy allows this script alone, by its digest.
        script = "\n".join(template_text(name) for name in ("uplot.min.js", "charts.js"))
    digest = base64.b64encode(sha256(script.encode()).digest()).decode("ascii")
    template = environment.get_template("report.html.j2")
    return template.render(page=page, version=__version__, script=script, digest=digest)


def template_text(name: str, package: str = "quantbench.report") -> str:
    """Reads a file of a package's folder `templates`."""
    return (files(package) / "templates" / name).read_text(encoding="utf-8")


def _fit_to_show(value: object) -> object:
    """Removes control and bidirectional characters from a text; leaves markup unchanged."""
    if type(value) is not str:
        return value
    return printable(value, longest=len(value))
