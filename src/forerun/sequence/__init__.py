"""One sequence: its canvas of tokens and blanks, and the rows that a forward runs for it."""
