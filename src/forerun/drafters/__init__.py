"""Drafters propose the next tokens. Whatever they propose, exact methods keep the target's law; a
good one saves forwards."""
