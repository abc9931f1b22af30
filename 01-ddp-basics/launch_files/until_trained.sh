#!/usr/bin/env bash
# torchrun in a pod of a Job; its arguments follow. To a Job, exit code 0 says that this pod's part is
# done for good. But when one pod is evicted, the ranks of all pods save and end, and torchrun ends
# with 0 in those that nobody told. So: 0 if the last step is saved, 75 ("try again") if the run was
# asked to stop before it, else what torchrun says.
#
# OUTPUT_DIR and MAX_STEPS are the script's --output-dir, on the volume of all pods, and --max-steps.
last="$OUTPUT_DIR/checkpoints/step-$(printf %08d "$MAX_STEPS")"
[[ ! -e $last ]] || exit 0 # the others have left: nobody to meet

# This shell is the pod's process 1, which is sent SIGTERM. It handles no signal while it waits for a
# command in the foreground.
torchrun "$@" &
agent=$!
told=no
trap 'told=yes; kill -TERM "$agent"' TERM
wait "$agent"
code=$?
while kill -0 "$agent" 2>/dev/null; do # the signal has ended that wait
  wait "$agent"
  code=$?
done

[[ $code == 0 || $told == yes ]] || exit "$code"
[[ -e $last ]] || exit 75
