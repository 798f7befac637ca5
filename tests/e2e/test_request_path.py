"""The list in docs/architecture.md of the files that a chat request crosses is the one that it does cross."""
import os
import subprocess
import sys

import pytest

from conftest import EDGE_ONLY, PROGRAM, TOP


@EDGE_ONLY
@pytest.mark.skipif("cuda" in os.environ.get("PERIGEE_FLAGS", ""), reason="the list is that of the CPU backend")
def test_the_listed_files_are_those_that_a_request_crosses():
    command = [sys.executable, TOP / "tools" / "request_path", "--check", "--build", os.path.dirname(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
