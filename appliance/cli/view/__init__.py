"""How results look on a terminal: shared by the commands."""
