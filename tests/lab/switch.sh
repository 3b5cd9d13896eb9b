#!/bin/bash
# The switch of a lab: a network namespace without a name, which lives as long as this process (see network.py).
# It ends when its maker closes stdin or dies, or after TTL seconds, and removes what the lab had to name on the machine.
set -eu
read -r pid _ < /proc/self/stat
ip -batch - <<< "$NETWORK"
echo "pid $pid"
read -r -t "$TTL" || true
# The hosts end now, too; a control group can go when its last process has gone.
for _ in {1..100}; do
    left=$(find /sys/fs/cgroup -mindepth 1 -maxdepth 15 -depth -type d -path "*/$LAB_ID*" 2>/dev/null || true)
    [ -n "$left" ] || break
    xargs -r rmdir 2>/dev/null <<< "$left" || sleep 0.05
done
[ -z "$FOLDER" ] || rm -rf -- "$FOLDER"
