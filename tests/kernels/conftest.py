"""The kernels' tests. Those of the Triton kernels live in interpreted/ and run in a process of their own.

Whether Triton interprets is fixed when it is imported, and must not be so for the other folders: test_interpreter.py
starts them with TRITON_INTERPRET=1. By hand: `TRITON_INTERPRET=1 pytest tests/kernels/interpreted`.
"""

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
