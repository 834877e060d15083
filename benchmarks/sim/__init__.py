"""The real scheduler and block manager over a trace, with a stub in the device's place.

Time in here is computed by a cost model (`cost.py`), never measured; counts (blocks, tokens,
batches, preemptions) are those of the real host code. Other systems' allocation and batching
policies run through the same loop's clock and the same cost model (`policies.py`).
"""
