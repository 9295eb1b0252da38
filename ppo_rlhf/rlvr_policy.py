"""Moved to rlvr/policy.py. This path works until the next release."""

import runpy

if __name__ == "__main__":
    runpy.run_module("ppo_rlhf.rlvr.policy", run_name="__main__", alter_sys=True)
