"""Two or more checkpoints in, measurements and a report out."""
