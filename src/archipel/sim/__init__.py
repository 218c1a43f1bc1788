"""The virtual clock: a modelled network, and the engine that runs actors on it.

What belongs here: times and bytes by formula, faults on purpose, the heap of events. What does not:
rules that hold on any clock (`run/`), and how a gradient is computed (`train/`).
"""
