set -uo pipefail
umask 022
PATH="${PATH:-/usr/bin:/bin}:/usr/local/sbin:/usr/sbin:/sbin"

die() { printf '%s: %s\n' "$(uname -n)" "$*" >&2; exit 1; }
say() { printf '%s: %s\n' "$(uname -n)" "$*"; }
words_of() { local text="$*"; printf '%s' "${text//[^[:print:]]/?}"; }

# The state of a file: its digest, or absent.
digest() {
  [ -e "$1" ] || { echo absent; return; }
  [ -f "$1" ] || { echo "no-file"; return; }
  sha256sum <"$1" | cut -c-64
}

# What the probe of a command prints, without blanks around it.
probed() {
  local text
  [ ${#probe[@]} -gt 0 ] || return 0
  text=$("${probe[@]}" 2>/dev/null) || true
  text="${text#"${text%%[![:space:]]*}"}"
  printf '%s' "${text%"${text##*[![:space:]]}"}"
}

# content VERB STEP NUMBER PATH BEFORE AFTER MODE FOLDER_MODE <base64
# BEFORE and AFTER are digests, or absent; an empty MODE keeps that of the file.
content() {
  local verb=$1 mark="$keep/$2.$3" path before=$5 after=$6 mode=$7 folder_mode=$8 now new folder
  path=$(readlink -m -- "$4")
  now=$(digest "$path")
  new="$(dirname "$path")/.$(basename "$path").gangline-script"
  case $verb in
    look)
      [ "$now" = "$after" ] && return
      [ "$now" = "$before" ] || { say "$path is not as it was read"; return 1; }
      todo=$((todo + 1)) ;;
    make)
      [ "$now" = "$after" ] && { say "$path is so already"; return; }
      if [ "$now" = absent ]; then
        : >"$mark.before-absent" && : >"$mark.folders" || return 1
        folder=$(dirname "$path")
        while [ ! -d "$folder" ]; do printf '%s\n' "$folder" >>"$mark.folders"; folder=$(dirname "$folder"); done
        tac "$mark.folders" | while read -r folder; do mkdir -m "$folder_mode" -- "$folder" || exit 1; done || return 1
      else
        cp -a -- "$path" "$mark.before" || return 1
      fi
      : >"$mark.done" || return 1
      if [ "$after" = absent ]; then
        rm -- "$path" || return 1
      else
        if [ "$now" = absent ]; then rm -f -- "$new"; else cp -a -- "$path" "$new" || return 1; fi
        base64 -d >"$new" || { rm -f -- "$new"; return 1; }
        if [ -n "$mode" ]; then chmod "$mode" -- "$new" || { rm -f -- "$new"; return 1; }; fi
        sync -- "$new" && mv -f -- "$new" "$path" || { rm -f -- "$new"; return 1; }
      fi
      [ "$(digest "$path")" = "$after" ] || return 1
      changed=1
      say "$path is changed; as it was: $mark.before" ;;
    undo)
      [ -e "$mark.done" ] || return 0
      if [ "$now" != "$after" ] && [ "$now" != "$before" ]; then
        [ "$force" = 1 ] || { say "$path was changed since and stays; as it was: $mark.before"; return 1; }
        cp -a -- "$path" "$mark.theirs" 2>/dev/null
      fi
      if [ "$now" != "$before" ]; then
        if [ "$before" = absent ]; then
          rm -f -- "$path"
        else
          cp -a -- "$mark.before" "$new" && mv -f -- "$new" "$path" || { rm -f -- "$new"; return 1; }
        fi
      fi
      if [ -s "$mark.folders" ]; then
        while read -r folder; do rmdir -- "$folder" 2>/dev/null; done <"$mark.folders"
      fi
      rm -f -- "$mark.done" "$mark.before" "$mark.before-absent" "$mark.folders"
      say "$path is as before" ;;
  esac
}

# program VERB STEP NUMBER BEFORE AFTER, with the arrays probe, run and back; AFTER is "?" where nobody knows it before.
# A command without a probe runs once, and again after each change of its step.
program() {
  local verb=$1 mark="$keep/$2.$3" before=$4 after=$5 now
  now=$(probed)
  case $verb in
    look)
      if [ ${#probe[@]} -eq 0 ]; then
        [ -e "$mark.done" ] || [ ${#run[@]} -eq 0 ] || todo=$((todo + 1))
        return 0
      fi
      [ "$now" = "$after" ] && return
      if [ "$after" = "?" ] && [ -e "$mark.done" ]; then return; fi
      [ "$now" = "$before" ] || { say "$(words_of "${run[@]}"): its state is '$now', and it was '$before'"; return 1; }
      todo=$((todo + 1)) ;;
    make)
      if [ ${#probe[@]} -eq 0 ]; then
        if [ -e "$mark.done" ] && [ "$changed" = 0 ]; then return; fi
      elif [ "$now" = "$after" ]; then
        return
      elif [ "$after" = "?" ] && [ -e "$mark.done" ]; then
        return
      fi
      : >"$mark.done" || return 1
      [ ${#run[@]} -gt 0 ] || return 0
      "${run[@]}" </dev/null || { say "$(words_of "${run[@]}") failed"; return 1; }
      now=$(probed)
      if [ ${#probe[@]} -gt 0 ]; then
        [ "$after" = "?" ] || [ "$now" = "$after" ] || { say "expected '$after', saw '$now'"; return 1; }
        printf '%s' "$now" >"$mark.done"
      fi
      changed=1
      say "did: $(words_of "${run[@]}")" ;;
    undo)
      [ -e "$mark.done" ] || return 0
      if [ ${#probe[@]} -gt 0 ] && [ "$now" != "$before" ] && [ -s "$mark.done" ] && [ "$force" = 0 ] &&
        [ "$now" != "$(cat "$mark.done")" ]; then
        say "$(words_of "${run[@]}"): its state is '$now' by now, and stays"
        return 1
      fi
      if [ ${#back[@]} -gt 0 ] && { [ ${#probe[@]} -eq 0 ] || [ "$now" != "$before" ]; }; then
        "${back[@]}" </dev/null || { say "$(words_of "${back[@]}") failed"; return 1; }
        say "did: $(words_of "${back[@]}")"
      fi
      rm -f -- "$mark.done" ;;
  esac
}

# each VERB STEP NUMBERS...: stops at the first that fails; an undo goes on, and fails at the end.
each() {
  local verb=$1 step=$2 number failed=0
  shift 2
  for number in "$@"; do
    "change_${part}_${step}_$number" "$verb" || { failed=1; [ "$verb" = undo ] || return 1; }
  done
  return "$failed"
}

undo_step() { # STEP NUM_CHANGES
  local numbers
  mapfile -t numbers < <(seq "$2" -1 1)
  each undo "$1" "${numbers[@]}"
}

# Takes the step back by itself after so many seconds, unless `keep` comes first. It needs neither a login nor a terminal.
start_guard() { # STEP SECONDS
  cp -- "$0" "$keep/script" && rm -rf -- "$keep/$1.decided" && : >"$keep/$1.waiting" || return 1
  if [ -d /run/systemd/system ]; then
    systemd-run --quiet --collect /bin/bash "$keep/script" guard "$1"
  else
    setsid /bin/bash "$keep/script" guard "$1" </dev/null >/dev/null 2>&1 &
  fi
}

make_step() { # STEP NUM_CHANGES SECONDS
  local step=$1 count=$2 seconds=$3 numbers todo=0 changed=0
  mapfile -t numbers < <(seq 1 "$count")
  mkdir -p -m 700 -- "$keep" || die "there is no room for what was there before: $keep"
  [ ! -e "$keep/$step.waiting" ] || die "$step waits for a new login: bash $0 keep, or bash $0 undo $step"
  each look "$step" "${numbers[@]}" || die "$step: nothing was changed; look again with gangline prepare $step"
  [ "$todo" -gt 0 ] || { say "$step: nothing to change"; return; }
  [ "$seconds" = 0 ] || start_guard "$step" "$seconds" || die "$step: nothing was changed: no timer can be started"
  if ! each make "$step" "${numbers[@]}"; then
    undo_step "$step" "$count" || true
    rm -f -- "$keep/$step.waiting"
    die "$step: it failed, and was taken back"
  fi
  [ "$seconds" = 0 ] || say "$step goes back in $seconds s by itself. Log in ANEW, and there: sudo bash $0 keep"
}

keep_steps() {
  local waiting found=0
  for waiting in "$keep"/*.waiting; do
    [ -e "$waiting" ] || continue
    mkdir -- "${waiting%.waiting}.decided" 2>/dev/null || die "too late: it was taken back"
    rm -f -- "$waiting"
    found=1
    say "$(basename "${waiting%.waiting}") stays"
  done
  [ "$found" = 1 ] || die "nothing waits"
}

guard() { # STEP NUM_CHANGES SECONDS
  sleep "$3"
  mkdir -- "$keep/$1.decided" 2>/dev/null || return 0
  force=1
  undo_step "$1" "$2"
  rm -f -- "$keep/$1.waiting"
}

# act VERB [STEP]: on the steps of this user, in their order; an undo in the reverse order.
act() {
  local verb=$1 wanted=${2:-} row name scope count seconds rows=("${steps[@]}") failed=0
  if [ "$verb" = undo ]; then mapfile -t rows < <(printf '%s\n' "${steps[@]}" | tac); fi
  for row in "${rows[@]}"; do
    IFS=: read -r name scope count seconds <<<"$row"
    [ -z "$wanted" ] || [ "$wanted" = "$name" ] || continue
    [ "$scope" = "$part" ] || continue
    case $verb in
      make) make_step "$name" "$count" "$seconds" ;;
      guard) guard "$name" "$count" "$seconds" ;;
      undo)
        [ -d "$keep" ] || continue
        mkdir -- "$keep/$name.decided" 2>/dev/null || true
        undo_step "$name" "$count" || failed=1
        rm -f -- "$keep/$name.waiting" ;;
    esac
  done
  return "$failed"
}

main() {
  local verb=${1:-make} name=${2:-} failed=0
  force=0
  case $verb in make | undo | keep | guard) ;; *) die "usage: bash $0 [make | undo [STEP] | keep]" ;; esac
  [ -f "$0" ] || die "save it as a file first: its timer and sudo read it again"
  if [ -n "$machine" ] && [ "$machine" != "$(cat /etc/machine-id 2>/dev/null)" ]; then
    die "this script is for another machine: $host"
  fi
  if [ "$(id -u)" != 0 ] || [ "$uid" = 0 ]; then
    [ "$(id -u)" = "$uid" ] || die "this script is for the user $user, or root"
    part=user keep=~/.local/state/gangline/prepare-script
    [ "$verb" = keep ] || act "$verb" "$name" || failed=1
  fi
  printf '%s\n' "${steps[@]}" | grep -q :root: || return "$failed"
  if [ "$(id -u)" != 0 ]; then
    sudo /bin/bash "$0" "$@" || failed=1
    return "$failed"
  fi
  part=root keep=/var/lib/gangline/prepare-script
  if [ "$verb" = keep ]; then keep_steps; else act "$verb" "$name" || failed=1; fi
  return "$failed"
}
