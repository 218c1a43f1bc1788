"""Bytes from host to host, over links that may be slow, far, and cut now and then.

What belongs here: getting parts of memory whole, once, in order and unseen by others from one
process to another. What does not: what the parts mean, and who sends them (`live/`): nothing here
knows of actors, methods or Ray.
"""
