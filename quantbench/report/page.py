"""Writes the report of a run as a self-contained HTML page; see `write_report`."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

from rich.text import Text

from quantbench import __version__
from quantbench.analysis.check import check_run
from quantbench.analysis.curves import curves_of
from quantbench.analysis.neighbours import rows_by_dtype
from quantbench.analysis.summary import (
    LayerRow,
    Point,
    floor_lines,
    layer_rows,
    points_of,
    providers_run_different_ops,
)
from quantbench.errors import StoreError, printable
from quantbench.files import write_file
from quantbench.report.content import Card, Section
from quantbench.report.lead import Lead, lead_of
from quantbench.report.op_curves import axis_section, losses_card
from quantbench.report.overview import maps_section
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
from quantbench.report.source import picture_caption, points_where
from quantbench.report.sweep_result import ops_line
from quantbench.store.folder import Run
from quantbench.sweep.axes import SHAPE_DIM
from quantbench.sweep.options import options_from_json
from quantbench.units import axis_words, counted, dashed

PAGE = "report.html"
# Maximum number of families whose steps the first screen explains. A family is the curves of one
# op, dtype and provider. The section on steps explains all families.
_MOST_EXPLAINED = 2


@dataclass(frozen=True)
class Page:
    """The content of a report page.

    banners: (kind, title, text) of each warning at the top. The kind is imported, simulated or
        warning.
    facts: (name, value) pairs for the foot of the page.
    lead: first screen; None if nothing was measured.
    lead_card: chart of the sizes that lose; None if there is no chart.
    explanation: text on the causes of the steps, and on short times near the floor, the time of an
        empty kernel; "" for none.
    origin: text after "Made by quantbench" in the last line.
    """

    title: str
    subtitle: str
    banners: Sequence[tuple[str, str, str]]
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    lead: Lead | None
    lead_card: Card | None
    explanation: str
    origin: str


@dataclass(frozen=True)
class Written:
    """Result of writing a report.

    page: path of the HTML file.
    lead: first screen of the page; None if nothing was measured.
    """

    page: Path
    lead: Lead | None


def write_report(run: Run, output: Path, where: Mapping[str, int] | None = None) -> Written:
    """Writes the report of a run.

    output: file whose name ends in .html or .htm, or folder for report.html. Missing folders are
        created.
    where: required value of each axis; None to show all points. Only points with these values are
        shown, but causes and rules are still found from the whole run.

    Raises StoreError if the page cannot be written, and InputError if no point has these values.
    """
    shown = points_where(points_of(run.records, run.info.device), where or {})
    page = build_page(run, shown, where or {})
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
    """Builds the page of a run.

    points: points of the run to show.
    where: axis values with which the points were selected; empty for all points.
    """
    info = run.info
    caption = partial(picture_caption, info)
    axes_of_points: dict[str, None] = {}
    for point in points:
        axes_of_points |= dict.fromkeys(point.axes)
    axes = [name for name in axes_of_points if name not in (*where, SHAPE_DIM)]
    rows = rows_by_dtype(points)
    layers = layer_rows(points) if providers_run_different_ops(points) else rows
    sections: list[Section | None] = []
    lead = None
    lead_card = None
    if info.options.get("models") and points:
        comparison = compare_shapes(points, options_from_json(info.options).models)
        lead = Lead(SHAPE_DIM, comparison_sentence(comparison))
        sections.append(comparison_section(comparison))
    elif points and not axes:
        lead = Lead(SHAPE_DIM, f"{counted(len(points), 'point')} measured, along no axis")
    explanation: list[str] = []
    all_sizes = None
    if points and axes:
        check = check_run(run, points=None if where else points)
        lead = replace(lead_of(layers, axes, check), ops=ops_line(layers))
        explanation += map(period_words, check.periods[:_MOST_EXPLAINED])
        explanation += floor_lines((point.latency_us, point) for point in points)
        for axis in sorted(axes, key=lambda axis: axis != lead.axis):
            curves = curves_of(points, axis) if where else check.curves.get(axis, ())
            sections.append(axis_section(axis, curves, check, caption))
        sections += [
            steps_section(check),
            maps_section(layers, axes, caption),
            rules_section(check.rules, info.device),
        ]
        if not lead.several:  # else the rows of the first table summarize many shapes
            lead_card = losses_card(layers, lead.bad, lead.axis, caption(points))
        all_sizes = sizes_section(rows, check)
    sections += [
        trust_section(run),
        all_sizes,
        how_section(run),
    ]
    title = "no point measured"
    if points:
        title = ", ".join(map(dashed, axes)) or "shapes side by side"
    if where:
        title += f" at {', '.join(axis_words(where, ' = '))}"
    return Page(
        title=f"{info.device.name}: {title}",
        subtitle=_subtitle(run, rows),
        banners=_banners(run, points),
        facts=facts_of(run),
        lead=lead,
        lead_card=lead_card,
        explanation=". ".join(explanation),
        sections=list(filter(None, sections)),
        origin=f" from {printable(str(run.folder))}",
    )


def _subtitle(run: Run, rows: Sequence[LayerRow]) -> str:
    """Formats a run's id, origin, providers, dtypes and time of start in one line."""
    info = run.info
    origin = "measured on this device" if info.origin == "measured" else info.origin
    providers: dict[str, None] = {}
    dtypes: dict[str, None] = {}
    for row in rows:
        providers[row.provider] = None
        dtypes[row.points[0].workload.dtype] = None
    parts = [info.run_id, origin, ", ".join(providers), ", ".join(dtypes), info.started]
    return printable(" · ".join(filter(None, parts)), 300)


def _banners(run: Run, points: Sequence[Point]) -> list[tuple[str, str, str]]:
    """Returns the warnings for the top of the page, as (kind, title, text)."""
    info = run.info
    origins = {info.origin}
    source = info.source
    for record in run.records:
        origins.add(record.origin)
        source = source or record.source
    found = []
    if "simulated" in origins:
        text = "These figures come from a simulation, not from a device."
        found.append(("simulated", "SIMULATED", text))
    if "imported" in origins:
        text = f"Measured by others, not on this machine: {printable(source, 240)}"
        found.append(("imported", "IMPORTED", text))
    if info.how_ended == "budget":
        text = (
            "Points that it did not reach are missing, and places without all of their ops are "
            "not weighed: sweep --resume measures the rest."
        )
        found.append(("warning", "STOPPED BY ITS BUDGET", text))
    elif info.how_ended != "complete":
        text = f"This run is {info.how_ended}; what it has is shown."
        found.append(("warning", "NOT FINISHED", text))
    if not points:
        text = "No point of this run has a figure; the reasons are below."
        found.append(("warning", "NOTHING MEASURED", text))
    for warning in run.warnings:
        found.append(("warning", "NOTE", printable(warning)))
    return found


def render(page: Page) -> str:
    """Renders the page as HTML, with every text escaped.

    Raises an error if the template uses an undefined name.
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
        # The page's content security policy allows only the script with this digest.
        script = "\n".join(template_text(name) for name in ("uplot.min.js", "charts.js"))
    digest = base64.b64encode(sha256(script.encode()).digest()).decode("ascii")
    template = environment.get_template("report.html.j2")
    return template.render(page=page, version=__version__, script=script, digest=digest)


def template_text(name: str, package: str = "quantbench.report") -> str:
    """Reads a file in the folder `templates` of a package."""
    return (files(package) / "templates" / name).read_text(encoding="utf-8")


def _fit_to_show(value: object) -> object:
    """Removes a text's style, and escapes its control and other invisible characters.

    Values of other types, such as escaped markup, are returned unchanged.
    """
    text = value.plain if isinstance(value, Text) else value
    if type(text) is not str:
        return text
    return printable(text, longest=len(text))
