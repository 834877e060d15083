"""One small program an engine, each run by the interpreter of its own environment."""
