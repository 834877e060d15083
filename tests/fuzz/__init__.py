"""Mutated files against every reader: small and seeded here, by the thousand in benchmarks."""
