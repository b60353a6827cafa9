"""Laws and what is done with them: arithmetic, acceptance rules, choosing blanks, noise, and how
logits become laws."""
