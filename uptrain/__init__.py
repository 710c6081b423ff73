"""Checkpoint and tokens in, checkpoint out: the training that recovers what conversion cost."""
