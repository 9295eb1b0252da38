"""python limited_run.py <bytes> <script> <arguments>: a script whose files may not grow beyond so many bytes; 0: any.

A write beyond that fails as on a full disk. The script also loses the rights of root, who may write everywhere.
"""

import ctypes
import os
import resource
import runpy
import sys


class Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class Sets(ctypes.Structure):
    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]


def drop_rights() -> None:
    """Linux: give up all capabilities of this process (capset, version 3, which takes two sets)."""
    failed = ctypes.CDLL(None).capset(ctypes.byref(Header(0x20080522, 0)), (Sets * 2)())
    assert not failed


if sys.platform == "linux" and os.geteuid() == 0:
    drop_rights()
if largest := int(sys.argv[1]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
