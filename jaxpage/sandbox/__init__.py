"""Runs untrusted templates within bounds of time and memory. Knows nothing of chats."""
