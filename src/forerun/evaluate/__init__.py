"""How good the output is and what it costs: methods side by side, tasks, and what limits a
method."""
