"""What a training job holds, computes, sends and takes: formulas in plain Python, without torch.

`job.py` says what is trained and how it is laid out, `hardware.py` on what, `memory.py` what a GPU
holds, `collectives.py` what a collective takes, `step.py` what a step takes.
"""
