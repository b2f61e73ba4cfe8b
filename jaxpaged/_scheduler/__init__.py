"""Which tokens of which request are computed in each step, as a pytree, inside jit.

`scheduler` has the public operations, in the order of a request:

1. `submit` (`submission`): it gets a place, or is refused.
2. `plan` (`planning`, the policy): it gets a seat, tokens of each step, drafts and blocks, or is preempted for others.
   With a prefix cache, `seats` gives out seats instead, to requests that begin with listed blocks.
3. `commit` and `abort` (`progress`): the step's tokens become known, and requests end.
4. `drain` (`progress`): the host gets the outbox, and the places of what ended are free.

`state` has the fields, `records` what goes in and out, and `inspection` the invariants.
"""
