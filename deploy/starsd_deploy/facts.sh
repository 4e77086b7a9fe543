# Gathers what the deployer must know of a device. POSIX sh and what every Debian or Ubuntu has; no Python,
# nothing is changed. Sent on stdin after a line `set -- ROOT UNIT SCOPE PORT [HOST:PORT ...]`.
# Each section is a line `@@starsd NAME` followed by raw text; facts.py makes sense of it.
root=$1 unit=$2 scope=$3 port=$4
shift 4
export LC_ALL=C LANG=C
PATH=$PATH:/usr/sbin:/sbin:/usr/local/sbin
case $root in /*) ;; *) root=$HOME/$root ;; esac
if [ "$scope" = user ]; then
    XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/run/user/$(id -u)}
    export XDG_RUNTIME_DIR
    unit_file=${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user/$unit
else
    unit_file=/etc/systemd/system/$unit
fi
sctl() { if [ "$scope" = user ]; then systemctl --user "$@"; else systemctl "$@"; fi; }

exec 2>/dev/null
section() { printf '\n@@starsd %s\n' "$1"; }

section clock
date -u +%s
cat /proc/sys/kernel/random/boot_id
cut -d' ' -f1 /proc/uptime
section uname
uname -s
uname -m
uname -r
uname -n
section os
cat /etc/os-release
section libc
getconf GNU_LIBC_VERSION
section tegra_release
cat /etc/nv_tegra_release
tree=/proc/device-tree
[ -e $tree/model ] || tree=/sys/firmware/devicetree/base
section model
tr '\0' '\n' <$tree/model
section compatible
tr '\0' '\n' <$tree/compatible
section nvpmodel
nvpmodel -q </dev/null
section dpkg
dpkg-query -W -f '${Package} ${Version}\n' nvidia-l4t-core nvidia-jetpack nvidia-jetpack-runtime 'libnvinfer[0-9]*' \
    'cuda-cudart-[0-9]*' 'python3-libnvinfer'
section container
if [ -e /.dockerenv ] || [ -e /run/.containerenv ]; then echo docker; fi
tr '\0' '\n' </proc/1/environ | sed -n 's/^container=//p'
section nvidia_smi
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader </dev/null
section memory
grep -E '^(MemTotal|MemAvailable|SwapTotal|SwapFree):' /proc/meminfo
section cpus
getconf _NPROCESSORS_ONLN
section disk
at=$root
while [ ! -d "$at" ]; do at=$(dirname "$at"); done
df -Pk "$at" | tail -n 1
df -Pi "$at" | tail -n 1
section user
id -un
id -u
id -Gn
echo "$HOME"
section device_groups
getent group video render | cut -d: -f1
section linger
loginctl show-user "$(id -un)" -p Linger --value || { [ -e "/var/lib/systemd/linger/$(id -un)" ] && echo yes; }
section sudo
if [ "$(id -u)" = 0 ]; then
    echo root
elif sudo -n true </dev/null; then
    echo free
elif command -v sudo >/dev/null && id -Gn | tr ' ' '\n' | grep -qxE 'sudo|wheel|admin'; then
    echo password
else
    echo none
fi
section python
tried=
for python in python3 python3.10 python3.11 python3.12 python3.13 python3.14; do
    path=$(command -v "$python") || continue
    case $tried in *" $(readlink -f "$path") "*) continue ;; esac
    tried="$tried $(readlink -f "$path") "
    env -u PYTHONPATH "$path" -I -c 'import sys, sysconfig, importlib.util as u
print(sys.executable, "%d.%d.%d" % sys.version_info[:3], sysconfig.get_platform(),
      "venv" if u.find_spec("venv") else "-", "ensurepip" if u.find_spec("ensurepip") else "-",
      "pip" if u.find_spec("pip") else "-", "tensorrt" if u.find_spec("tensorrt") else "-")' </dev/null
done
section systemd
cat /proc/1/comm || echo unknown # hidepid hides it from who is not root
sctl is-system-running </dev/null
section tools
for tool in sha256sum flock systemctl loginctl journalctl ss dd sync stat tar; do
    command -v "$tool" >/dev/null && echo "$tool"
done
section port
ss -ltnH "sport = :$port"
section routes
address() { # of HOST:PORT, whatever HOST is
    host=${1%:*} host=${host#[} host=${host%]}
    getent ahosts "$host" | sed -n '1s/[[:space:]].*//p'
}
for peer in "$@"; do
    echo "$peer $(ip route get "$(address "$peer")" | head -n 1 | sed 's/  */ /g')"
done
# a way that loses large packets silently (a tunnel, mostly) lets everything start and then hang
section mtu
for peer in "$@"; do
    at=$(address "$peer")
    dev=$(ip route get "$at" | sed -n '1s/.* dev \([^ ]*\).*/\1/p')
    mtu=$(cat "/sys/class/net/$dev/mtu") || continue
    case $at in *:*) headers=48 ;; *) headers=28 ;; esac
    said=unknown
    if ping -q -c 1 -W 2 "$at" </dev/null >/dev/null; then
        said=lost
        ping -q -M do -c 3 -i 0.2 -W 2 -s $((mtu - headers)) "$at" </dev/null >/dev/null && said=passes
    fi
    echo "$peer $mtu $dev $said"
done
section reach
for peer in "$@"; do
    python3 -I -c 'import socket, sys
host, _, port = sys.argv[1].rpartition(":")
try:
    socket.create_connection((host.strip("[]"), int(port)), 3).close()
    print(sys.argv[1], "open")
except OSError as error:
    print(sys.argv[1], error.strerror or error)' "$peer" </dev/null
done

section unit
sha256sum "$unit_file" | cut -d' ' -f1
sctl is-enabled "$unit" </dev/null
sctl is-active "$unit" </dev/null
pid=$(sctl show -p MainPID --value "$unit" </dev/null)
echo "${pid:-0}"
readlink "/proc/${pid:-0}/cwd"
section root
echo "$root"
cd "$root" || exit 0
section blobs
[ -d blobs ] && find blobs -maxdepth 1 -type f -exec stat -c '%n %s' {} +
section bundles
[ -d bundles ] && find bundles -maxdepth 1 -mindepth 1 -type d ! -name '.*' -exec basename {} \;
section releases
for release in releases/*/; do
    [ -d "$release" ] || continue
    line=$(basename "$release")
    for mark in complete gated confirmed; do [ -e "$release$mark" ] && line="$line $mark"; done
    echo "$line"
done
section manifests
for manifest in releases/*/release.json; do
    [ -e "$manifest" ] && { cat "$manifest"; echo; }
done
section history
tail -n 50 history
section restart_pending
[ -e restart_pending ] && echo yes
section current
readlink current
section public_key
cat keys/device.pub keys/service.pub | head -n 1
section pinned
for file in keys/services/*.pub; do [ -e "$file" ] && echo "$(basename "$file" .pub) $(tr '\n' ' ' <"$file")"; done
section trusted
for file in keys/trusted/*.pub; do
    [ -f "$file" ] && echo "$(basename "$file" .pub) $(sed -n 's/.*"public": *"\([^"]*\)".*/\1/p' "$file" | head -n 1)"
done
section engines
[ -d engines ] && find engines -maxdepth 1 -mindepth 1 -type f ! -name '*.*' -exec basename {} \;
section lease
cat lease/holder
section parts
[ -d parts ] && find parts -maxdepth 1 -type f -exec stat -c '%n %s' {} +
