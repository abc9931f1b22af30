"""Write a submission for results/: a JSON file with every point, and a page."""

import json
from pathlib import Path

from tabulate import tabulate

from bench.report import cells_of, list_reasons
from bench.store import write_json
from bench.strategies import REPO

FOLDER = REPO / "benchmarks" / "results"
NOT_SHOWN = ("points", "output_dir", "strategies_file")


def submit(analysis, name, note):
    """Write a sweep to results/NAME.json and NAME.md; return the JSON file."""
    sweep = analysis.sweep
    headers, tables = cells_of(analysis)
    records = [
        {key: value for key, value in record.items() if key != "verdict"}
        for record in sweep.records
    ]
    content = {
        "name": name,
        "note": note,
        "answer": [table.answer for table in analysis.tables],
        "condition": f"measured on {analysis.condition}",
        "started": sweep.started,
        "command": sweep.command,
        "where": analysis.where,
        "settings": sweep.settings,
        "tables": [
            {"title": table.title, "headers": headers, "rows": rows}
            | {"below": list_reasons(table)}
            for table, rows in zip(analysis.tables, tables, strict=True)
        ],
        "records": records,
    }
    path = FOLDER / f"{name}.json"
    FOLDER.mkdir(exist_ok=True)
    write_json(path, content)
    path.with_suffix(".md").write_text(render_page(path))
    return path


def render_page(path):
    """Return the page of a JSON file: answer, tables, hardware, versions, flags."""
    content = json.loads(Path(path).read_text())
    about = [("date", content["started"]), *content["where"].items()]
    about += [item for item in content["settings"].items() if item[0] not in NOT_SHOWN]
    rows = [
        (name, ", ".join(map(str, value)) if isinstance(value, list) else value)
        for name, value in about
    ]
    lines = [f"# {content['name']}", "", *content["answer"], "", content["condition"]]
    for table in content["tables"]:
        shown = tabulate(
            table["rows"], table["headers"], "github", disable_numparse=True
        )
        lines += ["", f"## {table['title']}", "", shown, ""]
        lines += [f"- {line}" for line in table["below"]]
    lines += ["", "## Hardware, versions, flags", ""]
    lines += [tabulate(rows, ("what", "value"), "github", disable_numparse=True)]
    lines += ["", "Command:", "", f"    {content['command']}", "", content["note"], ""]
    text = "\n".join(lines)
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text
