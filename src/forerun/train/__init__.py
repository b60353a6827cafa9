"""Training: objectives as pure functions of a batch, one loop for all of them, recipes as small
YAML files."""
