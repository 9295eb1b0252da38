"""The machinery that the scripts of chapters 2 and 3 share. Of scripts, it imports chapter 1's alone.

errors.py, files.py, hub.py, processes.py    lines for the user, files, the hub, what processes agree on
command_line.py, bounds.py                   arguments that all scripts have, presets, --resume
run.py, checkpoints.py, tracking.py          a run's folder, how it goes on after an interruption, where it is shown
learning_curves.py, traces.py                the picture of its metrics, episodes with all their numbers
several_stages.py                            training scripts in a row
pretrained.py, layers.py                     models before they are loaded, their layers
"""
