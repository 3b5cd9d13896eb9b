#!/bin/bash
# PID 1 of one lab host (see hosts.py). It runs in namespaces of its own (network, uts, mount, ipc, pid), builds a root
# folder of which nothing reaches the real one, and waits. Tells its maker "pid N", then "ready KEY"; waits for "go" in between.
# It ends, and with it everything in the host, when its maker closes stdin or dies, or after TTL seconds.
set -eu
# Read before /proc is the host's own: the number outside.
read -r pid _ < /proc/self/stat
echo "pid $pid"

# --- one disk of a given size: writes to /, home and /tmp share it
mount --make-rprivate /
[ -z "${INIT:-}" ] || . "${0%/*}/$INIT.sh"
mount -t tmpfs -o "size=$DISK,mode=755" lab "$BASE"
cd "$BASE"
mkdir upper scratch root home
mkdir -m 1777 tmp
chmod 700 home
lines() { [ -z "$1" ] || printf '%s\n' "$1"; }

# Programs, Python modules and paths that it does not have: an overlay's mark for "removed" in the upper layer.
shopt -s nullglob
hidden=()
while read -r name; do
    # Words with a star are expanded here.
    case $name in
        /*) found=($name) ;;
        *) found=(/{usr/local/,usr/,}{bin,sbin}/$name /{usr,usr/local}/lib/python3*/{,dist-packages/,site-packages/}$name{,.py}) ;;
    esac
    for path in "${found[@]}"; do
        [ -e "$path" ] || [ -L "$path" ] || continue
        path=$(realpath "${path%/*}")/${path##*/}
        [ ! -e "upper$path" ] || continue
        mkdir -p "upper${path%/*}"
        [ -c "upper$path" ] || mknod "upper$path" c 0 0
        hidden+=("$path")
    done
done < <(lines "$HIDE")
if [ -n "$LOGIN" ]; then
    # Folders that belong to a root who is nobody here cannot be written to; an upper folder of our own can.
    mkdir -p upper/{etc/ssh,usr/{bin,sbin,local/bin,lib},home,opt,srv,var/tmp}
    [ ! -d /usr/lib/x86_64-linux-gnu ] || mkdir upper/usr/lib/x86_64-linux-gnu
fi
if ! mount -t overlay overlay -o "lowerdir=/,upperdir=$BASE/upper,workdir=$BASE/scratch" root 2>/dev/null; then
    # Without root, or in some containers, / has mounts below it that an overlay may not cover: one overlay per folder.
    mount --bind root root
    for entry in /*; do
        name=${entry#/}
        if [ -L "$entry" ]; then
            cp -P "$entry" root/
        elif [ -d "$entry" ] && [ "$entry" != "$BASE" ]; then
            mkdir -p "root/$name" "upper/$name" "scratch/$name"
            case $name in proc | sys | dev | run | tmp  | lost+found) continue ;; esac
            mount -t overlay overlay -o "userxattr,lowerdir=/$name,upperdir=$BASE/upper/$name,workdir=$BASE/scratch/$name" "root/$name" 2>/dev/null ||
                { mount --rbind "/$name" "root/$name" && mount -o remount,bind,ro "root/$name" 2>/dev/null || true; }
        fi
    done
fi
cd root
for path in "${hidden[@]}"; do
    [ ! -e "./$path" ] || { echo "cannot hide $path here" >&2; exit 1; }
done

# --- kernel folders; settings of the whole machine cannot be written
mount -t proc proc proc
mount -t sysfs sysfs sys
for path in proc/sys proc/sysrq-trigger; do
    [ -e "$path" ] || continue
    mount --bind "$path" "$path"
    mount -o remount,bind,ro "$path"
done
mount -t tmpfs -o mode=755 dev dev
for device in null zero full random urandom tty fuse; do
    [ -e "/dev/$device" ] || continue
    touch "dev/$device"
    mount --bind "/dev/$device" "dev/$device"
done
mkdir dev/pts dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
ln -s /proc/self/fd/0 dev/stdin
ln -s /proc/self/fd/1 dev/stdout
ln -s /proc/self/fd/2 dev/stderr
mount -t devpts -o "newinstance,ptmxmode=0666,mode=620${TTY_GROUP:+,gid=$TTY_GROUP}" devpts dev/pts
mount -t tmpfs -o "size=$SHM,mode=1777" shm dev/shm
mount -t tmpfs -o size=64m,mode=755 run run
mkdir -p run/sshd run/lock

# --- private home and /tmp; what tests use is masked, what this host may see is mounted read-only at its own path
mkdir -p "./$HOME" 2>/dev/null || true
mount --bind ../home "./$HOME"
mount --bind ../tmp tmp
while read -r path; do
    [ ! -d "./$path" ] || mount -t tmpfs -o size=1m,mode=755 masked "./$path"
done < <(lines "$MASKS")
while read -r path; do
    mkdir -p "./$path"
    mount --bind "$path" "./$path"
    mount -o remount,bind,ro "./$path" 2>/dev/null || true
done < <(lines "$BINDS")
while read -r source path; do
    mkdir -p "./$path"
    mount --bind "$source" "./$path"
done < <(lines "$SHARES")

# --- its Python
if [ -n "$PYTHON_EXECUTABLE" ]; then
    mkdir -p usr/local/bin
    for name in python3 "${PYTHON_EXECUTABLE##*/}"; do
        ln -sfn "$PYTHON_EXECUTABLE" "usr/local/bin/$name"
    done
fi

# --- who it is
hostname "$NAME"
accounts=$(< /etc/passwd)
rm -f etc/hostname etc/hosts
lines "$NAME" > etc/hostname
lines "$HOSTS" > etc/hosts
if [ -n "$LOGIN" ]; then
    rm -f etc/passwd
    # First, so that it is also the name of that number.
    printf '%s\n' "$LOGIN:x:$LOGIN_UID:$LOGIN_GID::$HOME:/bin/bash" "$accounts" > etc/passwd
fi
mkdir -p -m 700 "./$HOME/.ssh"
(umask 077 && cd "./$HOME/.ssh" && for file in authorized_keys config id_ed25519 id_ed25519.pub known_hosts; do
    variable="SSH_$file"
    variable=${variable/./_}
    [ -z "${!variable:-}" ] || printf '%s\n' "${!variable}" > "$file"
done)

mkdir old
pivot_root . old
cd /
umount -l /old
rmdir old

key=none
if [ -n "$SSHD" ]; then
    rm -f /etc/ssh/ssh_host_* /etc/ssh/sshd_config
    ssh-keygen -q -t ed25519 -N '' -C "$NAME" -f /etc/ssh/ssh_host_ed25519_key
    lines "$SSHD" > /etc/ssh/sshd_config
    key=$(< /etc/ssh/ssh_host_ed25519_key.pub)
fi

# --- network: its maker has plugged the cables in once it says "go"
read -r -t "$TTL" go
lines "$NETWORK" | ip -batch -
if [ -n "$SSHD" ]; then
    if [ -n "$LOGIN" ]; then
        # sshd cannot drop privileges as the only user of a user namespace, so it runs as that user.
        unshare --user --map-user="$LOGIN_UID" --map-group="$LOGIN_GID" /usr/sbin/sshd
    else
        /usr/sbin/sshd
    fi
fi
echo "ready $key"
if [ -n "${INIT:-}" ]; then
    serve
    exit
fi

# Orphans of the host are its children: bash reaps them in `wait`, and only there.
exec 3<&0
(read -r -t "$TTL" <&3) &
watch=$!
while kill -0 "$watch" 2>/dev/null; do wait -n || true; done
