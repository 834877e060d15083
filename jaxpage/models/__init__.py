"""Models as Flax Linen modules without state: parameters, cache and attention are arguments."""
