"""Models as Flax Linen modules without state: parameters, cache and operations are arguments."""
