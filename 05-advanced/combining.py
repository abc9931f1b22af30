"""Plan a training job: which layout of GPUs, what it holds and sends, how long a step takes.

    CPU   python 05-advanced/combining.py plan --model llama2-7b --gpus 8
    also  python 05-advanced/combining.py predict --model llama3-70b --tp 8 --pp 2 --dp 4 --zero 1
          python 05-advanced/combining.py simulate --model llama2-7b --pp 4 --dp 2

No GPU is needed, now or later: the formulas are dist_common/costs', in plain Python, and
benchmarks/validate.py sets them beside what others published. `plan` searches all layouts, and
`predict` says what one holds, sends and takes (combining.md, planner.md): planner.py in
advanced_parts, with plan_args.py, plan_rules.py, plan_search.py, plan_finetune.py, plan_resnet.py,
plan_text.py, plan_axes.py, plan_cheaper.py, plan_picture.py, plan_explain.py and plan_launch.py.
`simulate` plays one step as events (simulate.md): simulate.py, with simulate_picture.py, and
simulate_measured.py, which runs what is simulated.

Look for: which axis crosses which link, whether the memory fits, and which axis is exposed.
Sources: Korthikanti et al. (2022) for memory, Narayanan et al. (SC 2021) for pipelines and order.
"""

import sys

from advanced_parts import planner
from dist_common import cli


def main() -> int:
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    if verb not in (*planner.VERBS, "simulate", "-h", "--help"):
        raise cli.UsageError("say what to do: plan, predict or simulate")
    if verb == "simulate":  # what it compares with real runs needs PyTorch, the others do not
        from advanced_parts.simulate import simulate

        return simulate(sys.argv[2:])
    return planner.main()


if __name__ == "__main__":
    cli.run(main)
