"""The server: OpenAI's HTTP interface, and our own, in front of models' engines."""
