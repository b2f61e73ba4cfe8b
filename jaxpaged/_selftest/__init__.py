"""The self-test of the kernels on a GPU.

| file | contents |
|---|---|
| `verdict` | whether the kernels are wrong on this GPU; calls use only this file, which imports the others if needed |
| `kept` | verdicts in the cache folder, and the quick test that makes one |
| `cases` | the cases that are compared with the reference |
| `report` | results of all cases, and times, for `python -m jaxpaged.selftest` |
"""
