"""The scheduler: decides the tokens of each step inside jit. Its state is a pytree.

`scheduler` has the public operations, in the order in which a request meets them:

1. `submit` (`submission`): the request gets a place, one entry of the scheduler's arrays, or is refused.
2. `admit` (`planning`): the request gets a seat, one row of the batch. With a prefix cache, `change_seats` (`seats`)
   gives it the seat, with the cached blocks that its prompt begins with.
3. `plan` (`planning`, the policy): in each step the request gets a number of tokens, drafts and blocks, or is preempted
   in favour of others.
4. `commit` and `abort` (`progress`): the step's tokens become known, and requests end.
5. `drain` (`progress`): the host gets the outbox, and the places of finished requests become free.

| file | contents |
|---|---|
| `state` | the fields of a scheduler |
| `records` | requests, step plan, outbox and other inputs and results |
| `arrays` | gathers of rows |
| `inspection` | the invariants, and a scheduler as text |
"""
