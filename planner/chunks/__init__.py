"""Rows of large products in chunks, one after the other: attention scores, logits."""
