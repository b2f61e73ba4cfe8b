"""Checks attention on this machine against the reference: `python -m jaxpaged.selftest`.

On an NVIDIA GPU since Ampere it checks the kernels. If all results are right, it compares their times with XLA, with
the GPU's memory bandwidth and with the rate of its matrix products. On other machines it checks what XLA computes.
It prints versions, tables in Markdown, and a line to report; docs/gpus.md says where. Exit codes: 0 if every result is
right, 1 if a result is wrong or a kernel failed.
"""

import argparse
import sys

from jaxpaged import _device
from jaxpaged._selftest import cases
from jaxpaged._selftest.kept import keep_fault
from jaxpaged._selftest.report import case_names, find_gpu, report, versions


def main(arguments: list[str] | None = None) -> int:
    how = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser("python -m jaxpaged.selftest", description=__doc__, formatter_class=how).parse_args(
        arguments
    )
    print(versions())
    try:
        gpu = find_gpu()
    except NotImplementedError as reason:
        print(f"XLA is checked, not the kernels: {reason}\n")
        return 0 if report(_device.kind(), "xla", cases.CASES, {}) else 1
    device = f"{gpu.name} {gpu.compute_capability}, driver {_device.driver() or 'unknown'}"
    is_right = report(device, "mosaic_gpu", case_names(gpu.compute_capability))
    keep_fault(gpu, "" if is_right else "not every case is right")  # calls without a named implementation use it
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
