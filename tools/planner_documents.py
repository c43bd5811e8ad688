"""Reads published tables of layouts, completed with facts from their source documents.

The file contexts.toml beside a table fills empty cells, corrects cells that the document itself
shows to be wrong, and names cells that cannot be compared. Each entry says where its value was
found.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantbench.planner.rows import TableRow, read_table

CONTEXTS = "contexts.toml"


def read_documents(path: Path) -> tuple[TableRow, ...]:
    """Reads a table, and fills and corrects its cells from the contexts.toml beside it."""
    contexts = _contexts(path.parent)
    return tuple(_stated(row, _context_of(row, contexts)) for row in read_table(path))


def document_of(row: TableRow, folder: Path) -> str:
    """Returns the source document of a row.

    This is the row's source_file if the contexts.toml in `folder` names no document for it.
    """
    return str(_context_of(row, _contexts(folder)).get("document", row.source_file))


def _stated(row: TableRow, context: dict[str, Any]) -> TableRow:
    filled: dict[str, Any] = {}
    sections = [s for s in context.get("section", ()) if row.section.startswith(s["begins"])]
    for part in (context, *sections):
        for name, found in part.get("defaults", {}).items():
            if getattr(row, name) in (None, ""):
                filled[name] = found["value"]
    if "cluster" in context:
        filled["cluster"] = context["cluster"]["value"]
    for one in (*context.get("correction", ()), *context.get("uncounted", ())):
        if row.line == one["line"]:
            filled[one["cell"]] = one.get("value")
    found = replace(row, **filled)
    if found.heads is None and str(found.hidden) in context.get("heads", {}):
        return replace(found, heads=context["heads"][str(found.hidden)]["value"])
    return found


def _contexts(folder: Path) -> list[dict[str, Any]]:
    text = (folder / CONTEXTS).read_text(encoding="utf-8")
    return list(tomllib.loads(text)["context"])


def _context_of(row: TableRow, contexts: list[dict[str, Any]]) -> dict[str, Any]:
    matching = [c for c in contexts if row.source_file.startswith(c["source_file"])]
    return matching[0] if matching else {}
