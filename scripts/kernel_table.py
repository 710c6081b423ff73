"""The full table of what the decode kernel compiles to, for docs/results/kernels_compiled.json. Needs no GPU.

    python -m headfold.scripts.kernel_table --output docs/results/kernels_compiled.json

Compute capabilities 8.0 and 9.0, all head_dims, groups of 1, 4 and 8, all cache dtypes that the chip has, contiguous
and
pages of 16 and 64: 648 builds, some seconds of a core each.
"""

from __future__ import annotations

import argparse
import itertools
import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from headfold.kernels.compiled import compile_decode

HEAD_DIMS = (64, 72, 80, 96, 112, 128, 160, 256)
CACHE_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int4")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    import triton

    with ProcessPoolExecutor(arguments.processes) as pool:
        running = [
            pool.submit(compile_decode, capability, head_dim, group_size, cache_dtype=dtype, page_size=page_size)
            for capability, head_dim, group_size, dtype, page_size in itertools.product(
                (80, 90), HEAD_DIMS, (1, 4, 8), CACHE_DTYPES, (None, 16, 64)
            )
            if (capability, dtype) != (80, "float8_e4m3fn")
        ]
        builds = [future.result().as_dict() for future in running]
    table = {"triton": triton.__version__, "builds": builds}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
