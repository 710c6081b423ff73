"""What the decode kernel compiles to, over all builds of `compiled.table_builds`. Needs Triton, and no GPU.

    python -m headfold.scripts.kernel_table --output docs/results/kernels_compiled.json

More than a thousand builds, about two seconds of a core each. It may be stopped at any time: builds in the output that
were made from the same kernel, tile and Triton are kept. `readme_tables.py` makes the summary in docs/kernels.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headfold.kernels.compiled import build_tile, compile_decode, table_builds

SAVE_EVERY = 10


def fingerprint(arguments: dict[str, Any]) -> str:
    """Of everything that decides what a build becomes."""
    import triton

    from headfold.kernels import decode

    inputs = [arguments, asdict(build_tile(**arguments)), decode._attend.cache_key, triton.__version__]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]


def compile_record(arguments: dict[str, Any]) -> dict[str, Any]:
    return compile_decode(**arguments).as_dict()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    import triton

    wanted = {fingerprint(arguments): arguments for arguments in table_builds()}
    found: dict[str, dict[str, Any]] = {}
    if options.output.exists():
        kept = json.loads(options.output.read_text(encoding="utf-8"))["builds"]
        found = {record["fingerprint"]: record for record in kept if record["fingerprint"] in wanted}

    def save() -> None:
        builds = [found[key] for key in wanted if key in found]
        lines = ",\n  ".join(json.dumps(record) for record in builds)
        head = f'"triton": "{triton.__version__}",\n "planned": {len(wanted)}'
        text = f'{{\n {head},\n "builds": [\n  {lines}\n ]\n}}\n'
        options.output.parent.mkdir(parents=True, exist_ok=True)
        aside = options.output.with_suffix(".partial")
        aside.write_text(text, encoding="utf-8")
        aside.replace(options.output)

    missing = [key for key in wanted if key not in found]
    print(f"{len(found)} of {len(wanted)} builds are there", file=sys.stderr, flush=True)
    save()  # without those of another kernel
    with ProcessPoolExecutor(options.processes) as workers:
        running = {workers.submit(compile_record, wanted[key]): key for key in missing}
        for done, future in enumerate(as_completed(running), start=1):
            key = running[future]
            found[key] = {"fingerprint": key} | future.result()
            if done % SAVE_EVERY == 0 or done == len(missing):
                save()
                num_faulty = sum(bool(record["faults"]) for record in found.values())
                print(f"{len(found)} of {len(wanted)} builds, {num_faulty} with faults", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
