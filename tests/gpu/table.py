"""Verdicts with figures, one row a test: python tests/gpu/table.py VERDICTS.jsonl"""

import json
import sys
from pathlib import Path
from typing import Any


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    lines = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    print("| verdict | test | seconds | figures |\n|---|---|---|---|")
    for line in sorted(lines, key=lambda x: (x["file"], x["test"])):
        found = ", ".join(f"{name} {shown(value)}" for name, value in line["figures"].items())
        test = line["test"].removeprefix("test_").replace("_", " ")
        print(f"| {line['outcome']} | {line['file']}: {test} | {line['seconds']} | {found} |")
    counts = {kind: sum(line["outcome"] == kind for line in lines) for kind in ("passed", "failed", "skipped")}
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))


if __name__ == "__main__":
    main()
