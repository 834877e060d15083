"""The printed numbers of the PagedAttention paper beside ours."""
