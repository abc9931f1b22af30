"""Check DeepSpeed configs before a job waits in a queue for them: every finding in one line.

    CPU   python 03-deepspeed/check_config.py 03-deepspeed/configs/*.json
    GPU   python 03-deepspeed/check_config.py my_config.json --world-size 64 --device cuda

Any ds_config.json will do, for any script. Look for: who refuses what (DeepSpeed, our template,
this machine), what each finding costs, and the hints, which fail nothing. Exit code 1: there are
findings; 2: there is no such file.

Sources: deepspeed.ai, "DeepSpeed Configuration JSON"; the classes of the installed DeepSpeed, which
say which keys it knows.
"""

import argparse
import sys
from pathlib import Path

import torch

import ds_hints
import ds_rules
import ds_schema
import ds_setup
from dist_common import cli


class Parser(argparse.ArgumentParser):
    """argparse, with its errors in one line."""

    def error(self, message):
        raise cli.UsageError(message)


def findings_of(path, ranks=None):
    """Return all findings for one file. Raises: UsageError when it cannot be opened."""
    try:
        config, findings = ds_rules.read(path)
    except OSError as error:
        raise cli.UsageError(f"{path}: {error.strerror}") from error
    if config is None:  # no JSON: nothing else can be said
        return findings

    if shapes := list(ds_rules.wrong_shapes(config)):  # the other rules could not read it
        return findings + shapes
    findings += ds_rules.of_deepspeed(config, ranks)
    findings += ds_rules.of_script(config)
    findings += ds_rules.of_machine(config)
    findings += ds_rules.of_ops(config)
    findings += ds_hints.hints(config)

    return findings


def show(path, findings):
    """Print one line for each finding, by kind, the worst first; return how many are no hints."""
    for kind in (ds_schema.WRONG, ds_schema.SCRIPT, ds_schema.MACHINE, ds_schema.HINT):
        for finding in findings:
            if finding.kind == kind:
                stop = "" if finding.text.endswith(("?", ".")) else "."
                print(f"{path}: {kind}: {finding.text}{stop} Cost: {finding.cost}")
    failing = sum(finding.kind != ds_schema.HINT for finding in findings)
    hints = len(findings) - failing
    if not failing:
        print(f"{path}: OK" + f", {hints} hint{'s' * (hints != 1)}" * bool(hints))
    return failing


def parse_args():
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="a ds_config.json")
    add("--world-size", type=cli.positive_int, help="ranks, to multiply the batch sizes (unknown)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="for which device to ask what it can (auto: cuda where there is one)")  # fmt: skip
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here: use --device cpu")
    return args


def main():
    args = parse_args()
    ds_setup.prepare(torch.device(args.device))
    failing = 0
    missing = []
    for path in args.files:
        try:
            failing += show(path, findings_of(path, args.world_size))
        except cli.UsageError as error:
            missing.append(str(error))
    sys.stdout.flush()
    if missing:
        raise cli.UsageError("; ".join(missing))
    return cli.FAILED if failing else 0


if __name__ == "__main__":
    cli.run(main)
