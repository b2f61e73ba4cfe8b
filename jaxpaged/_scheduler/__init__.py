"""The scheduler: decides the tokens of each step inside jit. Its state is a pytree.

`scheduler` has the public operations, in the order of a request:

1. `submit` (`submission`): it gets a place, or is refused.
2. `admit` (`planning`): it gets a seat. With a prefix cache it gets one in `change_seats` (`seats`), and begins with
   listed blocks.
3. `plan` (`planning`, the policy): it gets tokens of each step, drafts and blocks, or is preempted for others.
4. `commit` and `abort` (`progress`): the step's tokens become known, and requests end.
5. `drain` (`progress`): the host gets the outbox, and the places of what ended are free.

`state` has the fields, `records` what goes in and out, `arrays` gathers of rows, and `inspection` the invariants.
"""
