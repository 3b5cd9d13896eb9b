# For hostinit.sh: a host whose programs run below a real systemd (see bare.py). systemd is process 1 of a pid namespace
# inside the host's own, so that the host can be booted again: the disk stays, /run, addresses and firewall rules do not.

# Its own part of every hierarchy of control groups: systemd would else make its slices among those of this machine. The
# switch removes them. Done before the host's root folder is in place.
own=$(< /proc/self/cgroup)
while IFS=: read -r _ hierarchy path; do
    parent=/sys/fs/cgroup/${hierarchy#name=}$path
    [ -n "$hierarchy" ] || parent=/sys/fs/cgroup/unified$path
    [ -w "$parent/cgroup.procs" ] || continue
    mkdir "$parent/$LAB_ID-$NAME"
    for file in cpuset.cpus cpuset.mems; do
        [ ! -e "$parent/$file" ] || cat "$parent/$file" > "$parent/$LAB_ID-$NAME/$file"
    done
    echo 0 > "$parent/$LAB_ID-$NAME/cgroup.procs"
done <<< "$own"

boot() {
    ip link set lo up
    unshare --mount --pid --cgroup --fork --kill-child bash -euc '
        mount -t proc proc /proc
        for path in /proc/sys /proc/sysrq-trigger; do
            [ -e "$path" ] || continue
            mount --bind "$path" "$path"
            mount -o remount,bind,ro "$path"
        done
        mount -t tmpfs -o size=64m,mode=755 run /run
        mkdir /run/lock
        mount -t tmpfs -o mode=755 control /sys/fs/cgroup
        mkdir /sys/fs/cgroup/systemd
        mount -t cgroup -o none,name=systemd systemd /sys/fs/cgroup/systemd
        # without a writable /sys, networkd and NetworkManager do not wait for udev
        mount -o remount,bind,ro /sys
        exec env -i PATH="$PATH" LANG=C.UTF-8 /lib/systemd/systemd --log-target=journal --show-status=no
    ' 3<&- < /dev/null &
    init=$!
}

halt() {
    # The first process of the inner namespace; all others end with it.
    local first
    read -r first < "/proc/$init/task/$init/children" || true # its last line has no end
    kill -KILL "$first" || true
    wait "$init" || true
    nft flush ruleset
    for card in /sys/class/net/eth*; do ip address flush dev "${card##*/}"; done
}

# Obeys its maker until it is gone, or for TTL seconds.
serve() {
    local word
    while read -r -t "$TTL" word; do
        "$word"
        echo "did $word"
    done
}
