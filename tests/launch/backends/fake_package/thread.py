"""Starts a thread when it is imported."""

from __future__ import annotations

import threading
import time

threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
