"""Measurements and long runs; README.md says which to run for which question."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))  # its models and its server
