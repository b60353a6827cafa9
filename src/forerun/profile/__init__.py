"""Where time goes: forwards against the machine's floor, decoding split into its parts, and which
options are fastest here."""
