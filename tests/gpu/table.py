"""Verdicts with figures, one row a test, and what is wrong: python tests/gpu/table.py FOLDER

For every file that was asked for FOLDER has NAME.status, pytest's exit status or `unfinished`, and NAME.jsonl, the verdicts of
tests/gpu/test_NAME.py. Ends with 1 if a test failed, pytest did not end with 0, a file has no verdict, or every test was skipped.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def read(folder: Path, names: Iterable[str]) -> list[dict[str, Any]]:
    """The last verdict on each test, by file and test."""
    paths = [path for name in names if (path := folder / f"{name}.jsonl").exists()]
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    last = {(line["file"], line["test"]): line for line in lines}
    return [last[key] for key in sorted(last)]


def wrong(statuses: dict[str, str], lines: list[dict[str, Any]]) -> list[str]:
    """What keeps the tests from having passed. statuses: of pytest, by file."""
    found = [f"{line['file']}: {line['test']} failed" for line in lines if line["outcome"] == "failed"]
    found += [f"{name}: pytest's status is {status}, see {name}.log" for name, status in statuses.items() if status != "0"]
    found += [f"{name}: no verdict, see {name}.log" for name in sorted(set(statuses) - {line["file"] for line in lines})]
    if all(line["outcome"] == "skipped" for line in lines):
        found.append("no test ran")
    return found


def main() -> int:
    folder = Path(sys.argv[1])
    statuses = {path.stem: path.read_text().strip() for path in sorted(folder.glob("*.status"))}
    lines = read(folder, statuses)
    print("| verdict | test | seconds | figures |\n|---|---|---|---|")
    for line in lines:
        found = ", ".join(f"{name} {shown(value)}" for name, value in line["figures"].items())
        test = line["test"].removeprefix("test_").replace("_", " ")
        print(f"| {line['outcome']} | {line['file']}: {test} | {line['seconds']} | {found} |")
    counts = {kind: sum(line["outcome"] == kind for line in lines) for kind in ("passed", "failed", "skipped")}
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    problems = wrong(statuses, lines)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
