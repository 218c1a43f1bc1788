"""The real clock: the simulator's actors, each in a process of its own.

What belongs here: whatever a live run needs and a simulated one does not. Where to begin reading:

- A process with one actor: `host` handles what comes, `verbs` is what its actor may ask for,
  `compute` trains and evaluates in a second thread, `marks` keeps the model for evaluations,
  `saves` is what goes to disk, `mail` and `all_reduce` are messages between actors, `line` is how
  they travel.
- The process of the command, or of a detached run (`archipel.detached`): `launch` goes the whole
  way from recipe to run directory; `prepare` and `rehearsal` work before the first process starts,
  `beginning`, `watch` and `ending` while there are hosts; `course`, `evaluations`, `home`,
  `health`, `restarts` are what the watch knows.
- Between them: `protocol` is what a host is told and tells.

Only `cluster`, `ray_host` and `fleet` call Ray.
"""
