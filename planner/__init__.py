"""Predict what a training job computes, sends, holds in memory and takes, in plain Python.

`job.py` describes the job and its layout, `hardware.py` the machine. `memory.py` predicts bytes on
a GPU, `collectives.py` the time of a collective, `step.py` the time of a step. `plan.py` and
`validate.py` are programs. Nothing here imports torch, a module of the guide or `legacy_common`.
"""
