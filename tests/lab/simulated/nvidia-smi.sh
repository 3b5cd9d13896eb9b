#!/bin/sh
# Simulated: there is no GPU. Replays text that gangline's lab wrote after nvidia-smi's public formats (see gpus.py).
here=/etc/gangline-lab/nvidia-smi
if [ -e "$here/error" ]; then
    cat "$here/error"
    exit "$(cat "$here/code")"
fi

# table FILE FIELDS FORMAT: the columns that were asked for
table() {
    awk -F '\t' -v fields="$2" -v format="$3" '
        function row(values, line, i) {
            for (i = 1; i <= count; i++) line = line (i > 1 ? ", " : "") values[i]
            print line
        }
        NR == 1 {
            for (i = 1; i <= NF; i++) place[$i] = i
            count = split(fields, wanted, ",")
            for (i = 1; i <= count; i++) if (!(wanted[i] in place)) {
                print "Field \"" wanted[i] "\" is not a valid field to query."
                exit 2
            }
            next
        }
        NR == 2 {
            for (i = 1; i <= count; i++) {
                unit[i] = $(place[wanted[i]])
                head[i] = wanted[i] (unit[i] == "" ? "" : " [" unit[i] "]")
            }
            if (format !~ /noheader/) row(head)
            next
        }
        {
            for (i = 1; i <= count; i++) {
                cell[i] = $(place[wanted[i]])
                if (format !~ /nounits/ && unit[i] != "" && cell[i] !~ /^\[/) cell[i] = cell[i] " " unit[i]
            }
            row(cell)
        }' "$here/$1"
}

fields='' format='' file='' what=screen
while [ $# -gt 0 ]; do
    case $1 in
        topo) what=topology ;;
        -x | --xml-format) what=xml ;;
        -L | --list-gpus) what=list ;;
        --query-gpu=*) what=table file=gpus fields=${1#*=} ;;
        --query-compute-apps=*) what=table file=processes fields=${1#*=} ;;
        --format=*) format=${1#*=} ;;
        -q | -m) ;;
        *)
            echo "nvidia-smi (simulated): nothing is written down for $1" >&2
            exit 2
            ;;
    esac
    shift
done
case $what in
    table) table "$file" "$(printf %s "$fields" | tr -d ' ')" "$format" ;;
    *) cat "$here/$what" ;;
esac
