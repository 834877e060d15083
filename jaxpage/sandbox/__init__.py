"""Templates from strangers, run within bounds. Knows nothing of chats."""
