#!/bin/bash
# The inside of tests/multiprocess/slurm_cluster.py: a controller and nodes, each a host with a network, a name and
# processes of its own.
#
#   slurm_hosts.sh all FOLDER     bring all up, say the process id, and hold them until standard input closes
#   slurm_hosts.sh node FOLDER N  bring node N up (again)
#
# FOLDER has slurm.conf, each host's /etc/hosts as hosts.hN, and what they write; SLURM's programs are on the PATH.
set -euo pipefail

node() {
    nsenter --net="/run/netns/h$2" unshare --uts --pid --mount --fork --kill-child --mount-proc \
        bash -c "hostname h$2; mount --bind '$1/hosts.h$2' /etc/hosts; slurmd-wlm -D -N h$2 -d '$(command -v slurmstepd-wlm)' & wait" \
        >>"$1/logs/h$2.out" 2>&1 </dev/null &
    echo $! >"$1/h$2.pid"
}

network() {
    ip link add bridge type bridge
    ip address add "$1" dev bridge
    ip link set bridge up
    ip link set lo up
}

host() {
    ip netns add "h$1"
    ip link add "port$1" type veth peer name net0 netns "h$1"
    ip link set "port$1" master bridge up
    ip -n "h$1" address add "$2" dev net0
    ip -n "h$1" link set lo up
    ip -n "h$1" link set net0 up
}

folder=$2
case $1 in
node) node "$folder" "$3" ;;
all)
    read -r pid _ </proc/self/stat # as the caller sees it, until there is a /proc of our own
    mount -t proc proc /proc
    mount -t tmpfs tmpfs /run
    mount --bind "$folder/hosts.h0" /etc/hosts
    hostname h0
    network 10.213.9.10/24
    slurmctld-wlm -D >"$folder/logs/h0.out" 2>&1 </dev/null &
    for n in 1 2 3; do
        host "$n" "10.213.9.1$n/24"
        node "$folder" "$n"
    done
    echo "$pid"
    cat >/dev/null
    ;;
esac
