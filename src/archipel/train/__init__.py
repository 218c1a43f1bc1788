"""What is trained, and how inner steps are taken, on this machine's cores or GPUs.

What belongs here: models, data, inner optimizers, gradients, evaluation. What does not: when
anything is due on a clock (`sim/`, `live/`), and outer steps (`methods/`).
"""
