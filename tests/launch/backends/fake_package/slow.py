"""Takes longer to import than any test waits."""

from __future__ import annotations

import time

time.sleep(120)
