"""The machinery that scripts share. Nothing here imports a script.

errors.py, files.py, hub.py, processes.py    lines for the user, files, the hub, what processes agree on
command_line.py, bounds.py                   arguments that all scripts have, presets, --resume
run.py, checkpoints.py, tracking.py          a run's folder, how it goes on after an interruption, where it is shown
learning_curves.py, traces.py                the picture of its metrics, episodes with all their numbers
several_stages.py                            training scripts in a row
pretrained.py, layers.py, precision.py       models before they are loaded, their layers, arithmetic
classifiers.py                              reward models from elsewhere
chat_templates.py                            what stands around a query in chapters 2 and 3
text_sources.py, published_texts.py          texts for chapter 1
preferences.py                               what people said
data_files.py                                rows of files and of the hub
reward_functions.py, rewards.py, tools.py    functions and tools of the user's; verifiers
confined_worker.py                           a process for what isn't ours, such as reasoning_gym_calls.py
"""
