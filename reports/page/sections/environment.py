"""Under which conditions the runs were made, and what differs between them."""

from __future__ import annotations

from reports.analysis.study import StudyFigures
from reports.page import conditions
from reports.page.section import Block, Paragraph, Section, Table


def warnings_section(study: StudyFigures) -> Section:
    shown = [
        Table(conditions.warnings_table(study), "What the runs warned of"),
        Table(
            conditions.disturbed_table(study),
            "Disturbed runs: others used the machine meanwhile; their figures are in, marked",
        ),
    ]
    blocks: list[Block] = [one for one in shown if one.data.rows]
    quiet = Paragraph("No run warned of anything, and no counted run was disturbed.", "plain")
    return Section(anchor="warnings", title="Warnings", blocks=tuple(blocks) or (quiet,))


def environment_section(study: StudyFigures) -> Section:
    facts = Table(conditions.environment_table(study), "What the counted runs ran on")
    none = Paragraph("No successful run recorded one.", "plain")
    blocks: list[Block] = (
        [Paragraph(conditions.environments_finding(study), "finding"), facts] if facts.data.rows else [none]
    )
    if study.drift is not None:
        blocks.append(Paragraph(conditions.allocations_finding(study.drift)))
        blocks.append(Table(conditions.allocations_table(study.drift), "The same cell in every allocation"))
    left_out = Table(conditions.left_out_table(study), "Runs left out")
    if left_out.data.rows:
        why = (
            "A cell's figure is over runs of one environment, the newest. These runs succeeded in another "
            "and are left out:"
        )
        blocks += [Paragraph(why), left_out]
    return Section(anchor="environment", title="Environment", blocks=tuple(blocks))
