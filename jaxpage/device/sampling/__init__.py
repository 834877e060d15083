"""From logits to tokens: `sample.py` is the whole, the other files are its parts."""
