"""How many devices a draft host carries: a model of the closed loop, and the command that asks it."""
