from __future__ import annotations

import subprocess
import sys

ROLE = """
import resource
from asyncrl.process.role import play
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))
play("actor-0", lambda: print(*resource.getrlimit(resource.RLIMIT_NOFILE)))
"""


def test_a_role_may_open_as_many_files_as_the_system_lets_it() -> None:
    done = subprocess.run([sys.executable, "-c", ROLE], stdout=subprocess.PIPE, text=True, timeout=30, check=True)
    assert done.stdout == "512 512\n"
