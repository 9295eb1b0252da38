"""python offline_run.py <script> <arguments>: a script of ours in a process that finds no network.

Nor do the processes that it starts, which are forks of it (processes.py). Their pictures are not laid out with care,
which would take longer than all else.
"""

import runpy
import socket
import sys

from matplotlib.figure import Figure


def refuse(*_, **__):
    raise OSError("there is no network here")


socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
Figure.tight_layout = lambda *_, **__: None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
