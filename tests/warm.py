"""What the server of processes.py does once, so that none of its processes has to: tables of transformers."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("gpt2")
