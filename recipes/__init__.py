"""The typed recipe, the stages in order, and the shipped YAML files."""
