"""What a model family looks like on disk."""
