"""The `headfold` command, and the repository's chores."""
