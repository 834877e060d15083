"""From logits to tokens: `sample` is the whole; the other files are its parts."""
