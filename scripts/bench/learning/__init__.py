"""Tables of learning: arms x tasks x seeds, one command each (command.py)."""
