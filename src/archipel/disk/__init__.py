"""What runs leave on disk.

What belongs here: run directories and saved states, in files that others can read too. What does
not: what is read from them for tables and plots (`report/`), and what is put into them (`run/`,
`simulation.py`, `live/`).
"""
