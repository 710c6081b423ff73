"""Writes the tables of README.md, docs/fold.md and docs/kernels.md from the results kept in docs/results/.

python scripts/readme_tables.py            # rewrites the pages
python scripts/readme_tables.py --check    # exit code 1 where a table is not what the results say
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"


def quickstart_table() -> str:
    """The demo's report in four rows."""
    report = read("quickstart")
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
    note = (
        f"Uptraining won back {share:.0%} of the loss (in nats) that mean pooling had cost. "
        f"Measured on {report['conditions']['device_name']}, in {report['conditions']['dtype']}: "
        "it claims nothing about GPUs."
    )
    return f"{table(rows, 'lrrr')}\n\n{note}"


def two_demos_table() -> str:
    """Perplexity in the two demos, by mean pooling and by fold."""
    rows: list[list[Any]] = [["demo", "method", "learning rate", "before", "converted", "after uptraining"]]
    for name in ("quickstart", "quickstart-fold"):
        recipe = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8"))
        perplexity = read(name)["perplexity"]
        stages = (f"{perplexity[stage]:.2f}" for stage in ("before", "converted", "after"))
        rows.append([f"`{name}`", recipe["convert"]["method"], f"{recipe['uptrain']['learning_rate']:g}", *stages])
    return table(rows, "llrrrr")


def read(name: str) -> Any:
    """A kept result."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(rows: list[list[Any]], aligned: str) -> str:
    """Markdown; `aligned` has a letter per column, l or r."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join({"l": "---", "r": "---:"}[letter] for letter in aligned) + "|")
    return "\n".join(lines)


def compiled_table() -> str:
    """What the decode kernel's machine code says, by chip and dtypes; and the builds that are not as they should be."""
    kept = read("kernels_compiled")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for build in kept["builds"]:
        groups.setdefault((build["capability"], build["q_dtype"], build["cache_dtype"]), []).append(build)

    def span(builds: list[dict[str, Any]], name: str, unit: int = 1) -> str:
        values = sorted({build[name] // unit for build in builds})
        return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"

    head = "chip, queries, cache, builds, sound, registers, spills, tiles ahead, KB ahead per SM"
    rows: list[list[Any]] = [head.split(", ")]
    for (capability, q_dtype, cache_dtype), builds in sorted(groups.items()):
        rows.append(
            [
                f"sm_{capability}",
                q_dtype,
                cache_dtype,
                len(builds),
                sum(not build["faults"] for build in builds),
                span(builds, "registers"),
                span(builds, "num_spills"),
                span(builds, "tiles_in_flight"),
                span(builds, "bytes_in_flight_per_sm", 1024),
            ]
        )
    faulty: dict[str, list[str]] = {}
    for build in kept["builds"]:
        if build["faults"]:
            kind = (
                f"sm_{build['capability']}, {build['q_dtype']} over {build['cache_dtype']}, D {build['head_dim']}, "
                f"groups of {build['group_size']}"
            )
            faulty.setdefault(kind, []).append(f"{_layout(build)}: {', '.join(build['faults'])}")
    total, sound = len(kept["builds"]), sum(not build["faults"] for build in kept["builds"])
    lines = [
        f"{sound} of {total} builds (Triton {kept['triton']}) are sound: K/V copies as wide as rows allow, no spills, "
        "at least 2 tiles and 48 KB per SM in flight, matrix instructions (but for float32 caches, for which there "
        "are none of full precision), and as many programs per SM as the split cost model counts on, less one at most.",
        *([f"**{kept['planned'] - total} more builds are still to be made.**"] if total < kept["planned"] else []),
        "",
        table(rows, "lllrrrrrr"),
        "",
        *(["Not so:", ""] if faulty else []),
        *(f"- {kind}: {'; '.join(which)}" for kind, which in faulty.items()),
    ]
    return "\n".join(lines).rstrip()


def _layout(build: dict[str, Any]) -> str:
    text = "contiguous" if build["page_size"] is None else f"pages of {build['page_size']}"
    if build["key_scales"] == "channel":
        text += ", scales of K per channel"
    return text + (", window" if build["window"] else "")


def cpu_decode_table() -> str:
    """Our attention's time over that of transformers' sdpa, on a CPU."""
    kept = read("cpu_decode")
    points = kept["attention"]
    lengths = sorted({point["num_keys"] for point in points})
    rows: list[list[Any]] = [["one layer: H/G, batch", *(f"{n} keys" for n in lengths)]]
    for kind in dict.fromkeys(_kind(point) for point in points):
        of_kind = {point["num_keys"]: f"{point['ratio']:.2f}" for point in points if _kind(point) == kind}
        rows.append([kind, *(of_kind.get(n, "") for n in lengths)])
    steps = kept["step"]
    step_lengths = sorted({point["num_keys"] for point in steps})
    step_rows: list[list[Any]] = [["whole step of a small model", *(f"{n} keys" for n in step_lengths)]]
    for batch_size, padded in dict.fromkeys((point["batch_size"], point["padded"]) for point in steps):
        of_kind = {
            p["num_keys"]: f"{p['ratio']:.2f}" for p in steps if (p["batch_size"], p["padded"]) == (batch_size, padded)
        }
        step_rows.append([f"batch {batch_size}{', padded' if padded else ''}", *(of_kind[n] for n in step_lengths)])
    difference = max(point["largest_difference"] for point in points + steps if point.get("dtype") != "bfloat16")
    intervals = [point["ratio_interval"] for point in points + steps]
    slower = sum(low > 1 for low, _ in intervals)
    as_fast = sum(low <= 1 <= high for low, high in intervals)
    return "\n\n".join(
        [
            table(rows, "l" + "r" * len(lengths)),
            table(step_rows, "l" + "r" * len(step_lengths)),
            f"Time over that of transformers' sdpa, medians of one run ({kept['machine']}, "
            f"torch {kept['versions']['torch']}, transformers {kept['versions']['transformers']}). Results in float32 "
            f"differ by at most {difference:.0e} of the largest value. By the 95 % interval of the ratio (bootstrap "
            f"over rounds) ours is faster at {len(intervals) - slower - as_fast} of {len(intervals)} points, slower at "
            f"{slower}, and cannot be told from sdpa at {as_fast}.",
        ]
    )


def _kind(point: dict[str, Any]) -> str:
    shape = f"{point['num_heads']}/{point['num_kv_heads']}, {point['batch_size']}"
    return shape + (", padded" if point["padded"] else "") + (", bfloat16" if point["dtype"] == "bfloat16" else "")


def first_token_table() -> str:
    """Time to the first token on a prefix hit, on a CPU."""
    kept = read("cpu_decode")
    rows: list[list[Any]] = [["prompt, tokens", "computed whole, ms", "prefix found, ms", "ratio"]]
    for point in kept["first_token"]:
        whole, hit = point["whole_prompt_seconds"], point["prefix_found_seconds"]
        rows.append([point["prompt_tokens"], f"{1e3 * whole:.1f}", f"{1e3 * hit:.2f}", f"{whole / hit:.0f}"])
    return table(rows, "rrrr")


def quickstart_methods_table() -> str:
    """Perplexity of the shipped model by method and number of KV heads, converted and after uptraining."""
    cells: dict[tuple[str, ...], dict[int, list[dict[str, float]]]] = {}
    kept = read("methods")["cells"]
    for name, cell in kept.items():
        _, method, grouping, count, seed, *more = name.split("/")
        if more == ["converted only"]:
            if f"quickstart/{method}/{grouping}/{count}/{seed}" in kept:
                continue  # that cell has the uptrained model as well
            more = []
        cells.setdefault((method, grouping, *more), {}).setdefault(int(count), []).append(cell)
    counts = sorted({count for of_method in cells.values() for count in of_method}, reverse=True)
    rows: list[list[Any]] = [
        ["method", *(f"{count} KV, {when}" for count in counts for when in ("converted", "uptrained"))]
    ]
    before = {cell["before"] for of_method in cells.values() for seeds in of_method.values() for cell in seeds}
    for (method, grouping, *more), of_method in sorted(cells.items(), key=lambda i: (_METHODS.index(i[0][0]), *i[0])):
        row = [", ".join([method, *([grouping] if method in ("fold", "aligned") else []), *more])]
        for count in counts:
            seeds = of_method.get(count, [])
            row += [
                _mean_and_range([cell[stage] for cell in seeds if stage in cell])
                for stage in ("converted", "uptrained")
            ]
        rows.append(row)
    return f"{table(rows, 'l' + 'rr' * len(counts))}\n\nBefore: {min(before):.2f}."


_METHODS = ("fold", "aligned", "mean", "first", "random")


def _mean_and_range(values: list[float]) -> str:
    """The mean, and how far the values lie around it where there are several that differ."""
    if not values:
        return ""
    mean = sum(values) / len(values)
    text = _short(mean)
    spread = max(abs(value - mean) for value in values)
    return f"{text} ± {float(f'{spread:.2g}'):,g}" if spread > 5e-3 else text


def _short(number: float) -> str:
    return f"{number:.2f}" if number < 1000 else f"{number:,.0f}"


def smollm2_table() -> str:
    """SmolLM2-135M from 3 KV heads to one: perplexity by method and calibration tokens, and its multiple."""
    cells = read("smollm2")["cells"]
    original = cells["smollm2/original"]["perplexity"]
    texts = list(original)
    rows: list[list[Any]] = [["method", "calibration tokens", "seconds", *texts]]
    rows.append(["original", "", "", *(f"{original[text]:.2f}" for text in texts)])
    for name, cell in sorted(cells.items(), key=lambda item: -item[1]["perplexity"][texts[0]]):
        if name == "smollm2/original":
            continue
        _, method, _, _, *calibration, _ = name.split("/")
        tokens = f"{int(calibration[1].split()[0]):,}" if calibration else ""
        found = cell["perplexity"]
        values = (f"{_short(found[text])} ({_short(found[text] / original[text])} x)" for text in texts)
        seconds = f"{cell['convert_seconds']:.0f}" if "convert_seconds" in cell else ""
        rows.append([method, tokens, seconds, *values])
    return table(rows, "lrr" + "r" * len(texts))


TABLES = {
    "quickstart_methods": quickstart_methods_table,
    "smollm2": smollm2_table,
    "quickstart": quickstart_table,
    "two_demos": two_demos_table,
    "compiled": compiled_table,
    "cpu_decode": cpu_decode_table,
    "first_token": first_token_table,
}
PAGES = (ROOT / "README.md", ROOT / "docs" / "fold.md", ROOT / "docs" / "kernels.md")


def with_tables(text: str) -> str:
    """The text with every `<!-- table: NAME -->` ... `<!-- end -->` filled."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


def main() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        filled = with_tables(text)
        if "--check" not in sys.argv[1:]:
            page.write_text(filled, encoding="utf-8")
        elif filled != text:
            sys.exit(f"{page.name}: a table is not what docs/results says; run scripts/readme_tables.py")


if __name__ == "__main__":
    main()
