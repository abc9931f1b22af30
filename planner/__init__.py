"""Predict memory, traffic and step time of a training job, in plain Python.

`job.py` describes the job and its layout, `hardware.py` the machine. `memory.py`
predicts bytes on a GPU, `communication.py` what each axis sends, `step.py` the time of
a step. `plan.py` and `validate.py` are programs. Nothing here imports torch or a module
of the guide.
"""
