"""The verdicts on the rules of thumb and the largest cliffs with their causes, as text. Pure."""

from __future__ import annotations

from quantbench.analysis.check import Check
from quantbench.analysis.rules import rule_named

_MOST_CLIFFS = 12


def rule_section(found: Check) -> list[str]:
    """A table of verdicts, then the largest cliffs."""
    lines = [
        "Time per unit of work where a rule is broken over where it is kept, with its 95 % interval.",
        "",
        "| rule | says | verdict | effect | pairs |",
        "|---|---|---|---:|---:|",
    ]
    for verdict in sorted(found.rules, key=lambda v: v.verdict == "NOT TESTED"):
        rule = rule_named(verdict.rule)
        effect = "–"
        if verdict.effect is not None:
            effect = f"{verdict.effect:.3f} ({verdict.low:.3f} to {verdict.high:.3f})"
        words = verdict.reason if verdict.verdict == "NOT TESTED" else f"{rule.predicate}: {rule.claim}"
        lines.append(f"| {rule.id} | {words} | {verdict.verdict} | {effect} | {verdict.num_pairs or '–'} |")
    lines += [
        "",
        f"{len(found.cliffs)} cliffs on {found.num_curves} curves" + ("; the largest:" if found.cliffs else "."),
    ]
    lines.append("")
    for cliff in found.cliffs[:_MOST_CLIFFS]:
        held = "".join(f", {name} = {value}" for name, value in cliff.held.items())
        lines.append(
            f"- {cliff.op} {cliff.provider}, {cliff.axis} = {cliff.at} to {cliff.next}{held}:"
            f" {cliff.ratio:.2f}x ({cliff.low:.2f} to {cliff.high:.2f}), {cliff.cause.kind}: {cliff.cause.words}"
        )
    return lines
