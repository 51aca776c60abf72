#!/bin/bash
# Runs experiments, or searches hyper-parameters, on a machine that is taken back after some time. What is there is packed
# every half minute, so that nothing is lost when the machine goes. Unpacked into RUNS, it is gone on with:
#   within.sh SECONDS PACKED.tgz RUNS EXPERIMENT [options of syngap run]
#   within.sh SECONDS PACKED.tgz RUNS tune EXPERIMENT [options of syngap tune]
set -u
seconds=$1 packed=$2 runs=$3
shift 3
command=run
case ${1-} in run | tune) command=$1; shift ;; esac
case $(basename "$packed") in
  *[!A-Za-z0-9._-]*) echo "within.sh: $packed: use letters, digits, '.', '_' and '-', so that any machine takes it" >&2; exit 2 ;;
esac
mkdir -p "$runs" "$(dirname "$packed")"
case $(realpath "$(dirname "$packed")")/ in
  "$(realpath "$runs")"/*) echo "within.sh: $packed is in $runs, which is packed into it: choose another folder" >&2; exit 2 ;;
esac
# tar ends with 1 where a file grew while it was read: runs go on meanwhile.
pack() {
  tar -C "$runs" -czf "$packed.partial" --exclude=./shared --exclude='*.safetensors' --exclude='*.partial' .
  [ $? -le 1 ] && mv "$packed.partial" "$packed"
}
( while sleep 30; do pack; done ) >/dev/null 2>&1 &
packing=$!
timeout --signal=INT --kill-after=10 "$seconds" "${PYTHON:-python3}" -m syngap "$command" "$@" --out "$runs" --resume
code=$?
kill "$packing"
pack
exit "$code"
