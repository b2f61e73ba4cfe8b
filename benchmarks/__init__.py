"""Measurements and long runs. README.md lists the question that each one answers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))  # its models and its server
