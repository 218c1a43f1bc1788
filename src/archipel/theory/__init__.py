"""What can be computed about NoLoCo without training anything.

What belongs here: exact moments on a quadratic, their figures, and the model of message times. What
does not: anything that runs actors.
"""
