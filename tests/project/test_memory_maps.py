"""A test run whose processes have too many memory maps fails."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import memory_maps

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not memory_maps.MAPS.exists(), reason="Linux says how many maps there are")
@pytest.mark.parametrize(("workers", "process"), [(0, "main"), (1, "gw0")])
def test_a_run_with_too_many_maps_fails(tmp_path, workers, process):
    (tmp_path / "conftest.py").write_text(
        "from tests.memory_maps import MemoryMaps\n"
        "def pytest_configure(config): config.pluginmanager.register(MemoryMaps(limit=10))\n"
    )
    (tmp_path / "test_nothing.py").write_text("def test_nothing(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"-n{workers}", f"--rootdir={tmp_path}"]
    run = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1, run.stdout + run.stderr
    assert f"\nERROR: too many memory maps: {process} " in run.stdout
