"""Checkpoint in, checkpoint out: multi-head attention to grouped-query attention, by the tensor."""
