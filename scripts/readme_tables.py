"""Writes the README's tables from the results kept in docs/results/.

python scripts/readme_tables.py            # rewrites README.md
python scripts/readme_tables.py --check    # exit code 1 where a table is not what the results say
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"


def quickstart_table() -> str:
    """The demo's report in four rows."""
    report: dict[str, Any] = json.loads((RESULTS / "quickstart.json").read_text(encoding="utf-8"))
    perplexity, cache = report["perplexity"], report["cache_bytes_per_token"]
    point = max(report["decode"], key=lambda point: (point["batch"] * point["context"], point["context"]))
    seconds = [point[side]["time_per_output_token_s"]["median"] for side in ("before", "after")]
    heads = [model["num_key_value_heads"] for model in report["models"]]
    share = report["recovered_share"]
    rows = [
        ["", "before", "converted", "after uptraining"],
        ["KV heads", str(heads[0]), str(heads[1]), str(heads[-1])],
        [
            "perplexity per token",
            *(f"{perplexity[stage]:.2f}" for stage in ("before", "converted", "after")),
        ],
        ["KV cache per token, bytes", f"{cache['before']:,.0f}", f"{cache['after']:,.0f}", f"{cache['after']:,.0f}"],
        [
            f"time per decoded token, batch {point['batch']}, context {point['context']}",
            f"{1e3 * seconds[0]:.1f} ms",
            "",
            f"{1e3 * seconds[1]:.1f} ms",
        ],
    ]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---|" + "---:|" * 3)
    note = (
        f"Uptraining won back {share:.0%} of the loss (in nats) that mean pooling had cost. "
        f"Measured on {report['conditions']['device_name']}, in {report['conditions']['dtype']}: "
        "it claims nothing about GPUs."
    )
    return "\n".join([*lines, "", note])


TABLES = {"quickstart": quickstart_table}


def with_tables(text: str) -> str:
    """The text with every `<!-- table: NAME -->` ... `<!-- end -->` filled."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    filled = with_tables(text)
    if "--check" in sys.argv[1:]:
        if filled != text:
            sys.exit("README.md: a table is not what docs/results says; run scripts/readme_tables.py")
        return
    readme.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main()
