"""What is true of a run whatever its clock: both engines call the rules in this folder.

What belongs here: who holds the model, which updates are refused, what happened, what must hold.
What does not: time, transport, gradients. Nothing here knows an engine.
"""
