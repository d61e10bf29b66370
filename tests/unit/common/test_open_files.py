from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource
from tokenloom.common.open_files import open_file_limit, raise_open_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 321))
print(open_file_limit(), raise_open_file_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["100", "321", "321", "321"]
