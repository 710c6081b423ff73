"""Memory of well-known GPUs, for `headfold plan`."""

from __future__ import annotations

import re

from headfold.convert.errors import RefusedError

# GB as the vendors' data sheets state it, counted as 10^9 bytes; drivers report the same or up to 7 % more
# (nvidia-smi shows 81559 MiB = 85.5e9 bytes on an H100 of "80 GB"), so what fits here fits there.
GPU_MEMORY_GB: dict[str, int] = {
    "T4-16GB": 16,
    "V100-16GB": 16,
    "V100-32GB": 32,
    "A10-24GB": 24,
    "A40-48GB": 48,
    "A100-40GB": 40,
    "A100-80GB": 80,
    "L4-24GB": 24,
    "L40S-48GB": 48,
    "RTX-3090-24GB": 24,
    "RTX-4090-24GB": 24,
    "RTX-5090-32GB": 32,
    "RTX-A6000-48GB": 48,
    "RTX-6000-Ada-48GB": 48,
    "RTX-PRO-6000-96GB": 96,
    "H20-96GB": 96,
    "H100-80GB": 80,
    "H100-NVL-94GB": 94,
    "GH200-96GB": 96,
    "H200-141GB": 141,
    "B200-180GB": 180,
    "MI210-64GB": 64,
    "MI250X-128GB": 128,
    "MI300X-192GB": 192,
    "MI325X-256GB": 256,
    "MI355X-288GB": 288,
}


def find_gpu(name: str) -> str:
    """The full name of a GPU: upper and lower case and hyphens are alike, and a beginning is enough if it is unique.

    Raises RefusedError with the names that are known.
    """
    wanted = _plain(name)
    matches = [gpu for gpu in GPU_MEMORY_GB if _plain(gpu) == wanted]
    matches = matches or [gpu for gpu in GPU_MEMORY_GB if wanted and _plain(gpu).startswith(wanted)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise RefusedError(f"GPU {name!r} may be {' or '.join(matches)}; say which")
    raise RefusedError(f"GPU {name!r} is not known; known are {', '.join(GPU_MEMORY_GB)}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
