"""The self-test of the kernels on a GPU.

| file | has |
|---|---|
| `verdict` | whether the kernels are wrong on this GPU: all that a call asks. Imports the others if a test may run |
| `kept` | verdicts kept in the cache folder, and the quick test that makes one |
| `cases` | the cases that are compared with the reference |
| `report` | all cases and times, for `python -m jaxpaged.selftest` |
"""
