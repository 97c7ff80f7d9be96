"""The command line with the kernel setting of the GPU tests: `python -m tests.distributed.command VERB ...`."""

from __future__ import annotations

import sys

from lightning_gdn.cli import main

if __name__ == "__main__":
    sys.exit(main())
