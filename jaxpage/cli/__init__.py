"""The parts of the command line: options, prompt files, result writers. None of them loads JAX."""
