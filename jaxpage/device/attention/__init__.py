"""Attention over a paged KV pool: each file one form, a function of arrays and a step.

A form knows queries, a layer's pool and the step; it refuses to know layers, rotary positions and
which sequence a block belongs to. `store_then_attend` stores the step's K and V first, so a query
sees its own token. All agree with `reference`, the plain float32 oracle:

- a query at position p of a row sees that row's positions p - window + 1 .. p, nothing else;
- a row with context_lens 0, and every padding token, gets exactly 0;
- softmax and accumulators are float32, whatever the pool holds;
- stale slots may hold anything, NaN too: nothing outside the live tokens has any influence.
"""
