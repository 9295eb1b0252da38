#!/usr/bin/env bash
# The README's commands on systems that have nothing of this one: a Debian (sid) with Python, make and git, and no wheels.
# First without a compiler, then with one. Prints for each Python how long each command took, its last lines, and the size of
# the environment.
#
#     bash benchmark/fresh_debian.sh FOLDER                       # Python 3.13 and 3.14; about two hours, 20 GB
#     GOALS=install bash benchmark/fresh_debian.sh FOLDER 3.14    # one Python, one command
#
# Needs root, debootstrap and a network; tests the commit that is checked out. Leaves the system in FOLDER (umount proc and dev
# before it is removed).
set -eu
checkout=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
root=$(realpath -m "$1")
shift
[ $# -gt 0 ] || set -- 3.13 3.14
authorities=/etc/ssl/certs/ca-certificates.crt

packages=python3,python3.13,python3.13-venv,python3.14,python3.14-venv,make,git,ca-certificates
[ -e "$root/usr/bin/python3.14" ] || debootstrap --variant=minbase --include=$packages sid "$root" > /dev/null
cp -L "$authorities" "$root$authorities"
cp /etc/resolv.conf /etc/hosts "$root/etc/"
mkdir -p "$root/srv"
mountpoint -q "$root/proc" || mount -t proc proc "$root/proc"
mountpoint -q "$root/dev" || mount --bind /dev "$root/dev"

inside() {
    chroot "$root" env -i PATH=/usr/local/bin:/usr/bin:/bin HOME=/srv/home LANG=C.UTF-8 \
        PIP_CERT="$authorities" SSL_CERT_FILE="$authorities" bash -c "$1"
}

for compiler in without with; do
    if [ $compiler = with ]; then
        inside "command -v cc || { apt-get -o Acquire::Check-Valid-Until=false update && apt-get install --yes gcc g++; }" > /dev/null
    elif inside "command -v cc" > /dev/null; then
        echo "$root has a compiler already, so it is not tried without one"
        continue
    fi
    for python in "$@"; do
        clone=/srv/$python-$compiler
        rm -rf "$root$clone" "$root/srv/home"
        mkdir "$root/srv/home"
        git clone --quiet "$checkout" "$root$clone"
        for goal in ${GOALS:-demo test}; do
            echo "== Python $python, $compiler a compiler: make $goal"
            inside "cd $clone && time make $goal PYTHON=python$python" 2>&1 | tail -n 16 || true
        done
        du -sh "$root$clone/.venv" | cut -f 1
    done
done
