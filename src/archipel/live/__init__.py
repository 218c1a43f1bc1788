"""The real clock: the simulator's actors, each in a process of its own.

What belongs here: whatever a live run needs and a simulated one does not. Only `cluster.py`,
`ray_host.py`, `watch.py` and `launch.py` know Ray.
"""
