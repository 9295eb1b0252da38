"""RLHF with PPO: what is where, in the order in which to read.

small/micro.py, ppo.py, grpo.py     the method in one file each; they import nothing of ours
train_reward.py, train_policy.py    chapter 1: reward model and PPO of 2019; train_both.py runs the two in a row
tldr/                               chapter 2, summaries: sft.py, reward.py, policy.py, and all.py for the three
rlvr/                               chapter 3, rewards that a program verifies: policy.py, its formulas in algebra.py
loop.py                             PPO for a loop of your own, by chapter 2's functions
from_trl.py                         a policy and a critic from a model with a value head that TRL saved
sample.py, judge.py, report/        look at what came out: texts, win rates, a page of a run
check/                              holds other code against the numbers of the originals
worlds/                             where texts and choices come from
"""
