"""What the drivers of several test files do with their cases, on every rank of a world."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from parallel.exchange import from_each
from parallel.placement import Placement


def answer(runs: Iterable[Callable[..., Any]], cases: list[dict[str, Any]], place: Placement, report: Path) -> None:
    """Call for each case the run that it names, with the case's other keys; write what every rank returned, by the case's name, as JSON."""
    known = {run.__name__: run for run in runs}
    found = {}
    for case in cases:
        arguments = {key: value for key, value in case.items() if key not in ("name", "run")}
        found[case["name"]] = from_each(known[case["run"]](place, **arguments), place)
    if place.is_root:
        report.write_text(json.dumps(found))
