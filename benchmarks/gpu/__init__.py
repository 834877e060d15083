"""The day of a card: kernels and a decode step, verified and timed."""
