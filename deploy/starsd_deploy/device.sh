# What the deployer does on a device, one verb a call. POSIX sh and coreutils; sent on stdin after a line
# `set -- ROOT TOKEN VERB ARGUMENT...`. Every verb can be cut at any point and run again: what marks a thing
# as done is always the last thing written, and is written by rename. TOKEN is the lease; a verb that changes
# anything stops if the lease is not ours any more.
set -eu
umask 077
export LC_ALL=C
PATH=$PATH:/usr/sbin:/sbin
root=$1 token=$2 verb=$3
shift 3
case $root in /*) ;; *) root=$HOME/$root ;; esac

LEASE_LOST=97 LEASE_HELD=98 NOT_RUNNING=96 UNHEALTHY=95 # known to runner.py
LEASE_LIFE_S=45                                        # four heartbeats of ten seconds may be lost
SYNC_CHUNKS=16                                         # of 4 MiB each, sent between two calls of sync

fail() { echo "$*" >&2; exit 1; }
# durable: the folder entry too, or a power cut brings the old name back
settle() { sync "$@" 2>/dev/null || sync; }
# wall clocks jump on boards without a battery, so time is counted from boot, and a boot has a name;
# a container's boot is its first process
boot() { echo "$(cat /proc/sys/kernel/random/boot_id)-$(sed 's/.*) //' /proc/1/stat | cut -d' ' -f20)"; }
uptime_s() { cut -d. -f1 /proc/uptime; }
put() { # put FILE MODE: stdin into FILE, whole or not at all
    mkdir -p "$(dirname "$1")"
    cat >"$1.new"
    chmod "$2" "$1.new"
    sync "$1.new" 2>/dev/null || true
    mv -f "$1.new" "$1"
}
use_scope() {
    unit=$1 scope=$2
    if [ "$scope" = user ]; then
        XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/run/user/$(id -u)}
        export XDG_RUNTIME_DIR
    fi
}
sctl() { if [ "$scope" = user ]; then systemctl --user "$@" </dev/null; else systemctl "$@" </dev/null; fi; }
main_pid() { sctl show -p MainPID --value "$unit" 2>/dev/null || echo 0; }

# --- lease -------------------------------------------------------------------------------------------------

locked() { # run "$@" while no other deployer looks at the lease
    mkdir -p "$root/lease"
    exec 9>>"$root/lease/lock"
    flock 9
    "$@"
    exec 9>&-
}
lease_alive() {
    [ -s "$root/lease/beat" ] || return 1
    read -r beat_boot beat_s <"$root/lease/beat"
    [ "$beat_boot" = "$(boot)" ] && [ $(($(uptime_s) - beat_s)) -lt $LEASE_LIFE_S ]
}
beat() { echo "$(boot) $(uptime_s)" | put "$root/lease/beat" 600; }
lease_ours() { [ "$(cat "$root/lease/token" 2>/dev/null)" = "$token" ]; }
# or what a cut has left of one
lease_there() { [ -e "$root/lease/holder" ] || [ -e "$root/lease/token" ] || [ -e "$root/lease/beat" ]; }
lease_take_locked() {
    if ! lease_ours && lease_alive; then
        cat "$root/lease/holder"
        exit $LEASE_HELD
    fi
    echo "$1" | put "$root/lease/holder" 600
    echo "$token" | put "$root/lease/token" 600
    beat
}
lease_beat_locked() {
    lease_ours || exit $LEASE_LOST
    beat
}
lease_drop_locked() { if lease_ours; then rm -f "$root/lease/token" "$root/lease/holder" "$root/lease/beat"; fi; }
lease_break_locked() { # prints `broken` where there was a lease
    ! lease_there || echo broken
    rm -f "$root/lease/token" "$root/lease/holder" "$root/lease/beat"
}
lease_take() { locked lease_take_locked "$1"; }
lease_beat() { locked lease_beat_locked; }
lease_drop() { [ ! -d "$root/lease" ] || locked lease_drop_locked; }
lease_break() { ! lease_there || locked lease_break_locked; }

# --- content -----------------------------------------------------------------------------------------------

prepare() { mkdir -p "$root/blobs" "$root/parts" "$root/bundles" "$root/releases" "$root/keys" "$root/engines"; }

parts() { # parts, then pairs SHA256 SIZE: part files in full length; prints `SHA256 INDEX...`, finished chunks
    cd "$root/parts"
    while [ $# -gt 0 ]; do
        if [ "$(stat -c %s "$1.part" 2>/dev/null)" != "$2" ]; then
            rm -f "$1.journal"
            : >"$1.part"
            truncate -s "$2" "$1.part"
        fi
        printf %s "$1"
        # whole lines only: a cut may have left half of the last one
        [ ! -e "$1.journal" ] || while read -r index; do printf ' %s' "$index"; done <"$1.journal"
        echo
        shift 2
    done
}

# openssl knows the processor's SHA instructions, coreutils on Debian and Ubuntu does not: four times slower
sha256() { if command -v openssl >/dev/null; then openssl dgst -sha256 -r; else sha256sum; fi | cut -d' ' -f1; }

chunk_hashes() { # chunk_hashes SHA256 CHUNK_MIB INDEX...: hash of each chunk of a part file, one a line
    part=$root/parts/$1.part mib=$2
    shift 2
    for index in "$@"; do
        echo "$index $(dd if="$part" bs=1048576 skip=$((index * mib)) count="$mib" 2>/dev/null | sha256)"
    done
}

# blob_stream CHUNK_MIB SHA256...: hash parts while they are being written, and make those that are right blobs.
# Stdin names each part's chunks in order as they are finished, then says `end`. Prints `bad SHA256` for a wrong one.
# The disk writes along, or all of it would be left for the end.
blob_stream() {
    mib=$1
    shift
    cd "$root/parts"
    for sha in "$@"; do
        have=$(while read -r index && [ "$index" != end ]; do
            dd if="$sha.part" bs=131072 skip=$((index * mib * 8)) count=$((mib * 8)) 2>/dev/null
            if [ $((index % SYNC_CHUNKS)) -eq 0 ]; then sync -d "$sha.part" >/dev/null 2>&1 & fi
        done | sha256)
        if [ "$have" = "$sha" ]; then
            lease_ours || exit $LEASE_LOST # hours may have passed
            chmod 400 "$sha.part"
            settle "$sha.part"
            mv -f "$sha.part" "../blobs/$sha"
            rm -f "$sha.journal"
        else
            echo "bad $sha"
        fi
    done
    settle "$root/blobs"
}

link_or_copy() { ln -f "$1" "$2" 2>/dev/null || cp "$1" "$2"; }

bundle() { # bundle ID, then pairs SHA256 PATH
    id=$1
    shift
    [ -d "$root/bundles/$id" ] && return
    stage=$root/bundles/.$id.new
    rm -rf "$stage"
    mkdir -p "$stage"
    while [ $# -gt 0 ]; do
        mkdir -p "$(dirname "$stage/$2")"
        link_or_copy "$root/blobs/$1" "$stage/$2"
        shift 2
    done
    settle "$stage"
    mv "$stage" "$root/bundles/$id"
    settle "$root/bundles"
}

# release ID PYTHON SITE(-|site) RUN GATE CONFIG MANIFEST UNPACK.PY N, then N pairs LINK CONTENT_ID, then pairs SHA256 WHEEL
release() {
    id=$1 python=$2 site=$3 run=$4 gate_text=$5 config=$6 manifest=$7 unpack=$8 links=$9
    shift 9
    here=$root/releases/$id
    [ -e "$here/complete" ] && return
    rm -rf "$here"
    mkdir -p "$here/wheels"
    while [ "$links" -gt 0 ]; do
        mkdir -p "$(dirname "$here/$1")"
        ln -sr "$root/bundles/$2" "$here/$1"
        links=$((links - 1))
        shift 2
    done
    while [ $# -gt 0 ]; do
        link_or_copy "$root/blobs/$1" "$here/wheels/$2"
        shift 2
    done
    [ "$site" = site ] && site=--system-site-packages || site=
    # --without-pip: Debian's python3-venv may be missing; a ROS user's PYTHONPATH must not leak in
    # shellcheck disable=SC2086
    env -u PYTHONPATH "$python" -I -m venv --without-pip $site "$here/venv"
    "$here/venv/bin/python" -I -c "$unpack" "$here"/wheels/*.whl
    printf '%s' "$manifest" | put "$here/release.json" 600
    printf '%s' "$run" | put "$here/run" 700
    printf '%s' "$gate_text" | put "$here/gate" 700
    printf '%s' "$config" | put "$here/config/config.toml" 600
    rm -rf "$here/wheels"
    settle # the venv is thousands of files: all of it reaches the disk before the mark does
    : | put "$here/complete" 600
    settle "$here"
}

# --- engines -----------------------------------------------------------------------------------------------

# engines/KEY names a finished engine: `FILE SHA256 SIZE`, FILE in cache/engines. Whoever builds holds a lock on KEY.lock,
# which ends with the process, however that ends.
engine_start() { # engine_start KEY RELEASE SCRIPT: build it, unless it is there or being built. Returns at once
    mkdir -p "$root/engines"
    job=$root/engines/$1
    [ ! -e "$job" ] || return 0
    exec 8>>"$job.lock"
    flock -n 8 || return 0
    (
        # it outlives this connection; beside it the running release goes first, and lives where memory is short
        trap '' HUP
        echo 1000 >/proc/self/oom_score_adj || true
        cd "$root/releases/$2"
        made=$(nice -n 10 sh -c "$3" 2>"$job.log" | tail -n 1) || true
        [ -s "$made" ] || exit 1
        settle "$made"
        echo "$(basename "$made") $(sha256 <"$made") $(stat -c %s "$made")" | put "$job" 600
        settle "$root/engines"
    ) </dev/null >/dev/null 2>&1 &
    exec 8>&-
}

engine_state() { # engine_state KEY: `done FILE SHA256 SIZE`, `building`, `none`, or `failed` and why
    job=$root/engines/$1
    if [ -e "$job" ]; then
        echo "done $(cat "$job")"
    elif [ -e "$job.lock" ] && ! flock -n "$job.lock" true; then
        echo building
    elif [ -e "$job" ]; then
        echo "done $(cat "$job")"
    elif [ -e "$job.log" ]; then
        echo failed
        tail -n 20 "$job.log"
    else
        echo none
    fi
}

engine_put() { # engine_put KEY FILE SHA256 SIZE: a blob that was sent becomes the engine
    mkdir -p "$root/engines" "$root/cache/engines"
    mv -f "$root/blobs/$3" "$root/cache/engines/$2"
    settle "$root/cache/engines"
    echo "$2 $3 $4" | put "$root/engines/$1" 600
    settle "$root/engines"
}

# --- going live --------------------------------------------------------------------------------------------

gate() { # gate ID TIMEOUT_S
    here=$root/releases/$1
    [ -e "$here/gated" ] && return
    # where memory is short, the candidate dies and the release that serves stays
    echo 1000 >/proc/self/oom_score_adj 2>/dev/null || true
    status=0
    timeout "$2" "$here/gate" >"$here/gate.log" 2>&1 </dev/null || status=$?
    if [ $status -ne 0 ]; then
        [ $status -eq 124 ] && echo "the health gate did not end within $2 s" >&2
        tail -n 30 "$here/gate.log" >&2
        exit $UNHEALTHY
    fi
    : | put "$here/gated" 600
    settle "$here"
}

switch() { # switch ID
    [ -e "$root/releases/$1/complete" ] || fail "release $1 is not complete"
    if [ "$(readlink "$root/current" 2>/dev/null)" = "releases/$1" ]; then return; fi
    echo "$1" >>"$root/history"
    ln -sfn "releases/$1" "$root/current.new"
    mv -fT "$root/current.new" "$root/current"
    settle "$root"
    note "switch" "$1"
}

note() { # note EVENT RELEASE: one line of JSON
    by=$(cat "$root/lease/holder" 2>/dev/null || echo null)
    printf '{"at": "%s", "event": "%s", "release": "%s", "by": %s}\n' "$(date -u +%FT%TZ)" "$1" "$2" "$by" >>"$root/releases.log"
}

shim() { # the command for people who log in: always the current release's
    put "$root/bin/starsd" 700 <<EOF
#!/bin/sh
export STARSD_CONFIG="$root/current/config" STARSD_KEYS="$root/keys" STARSD_CACHE="$root/cache" STARSD_STATE="$root/state"
exec env -u PYTHONPATH "$root/current/venv/bin/python" -I -m starsd_edge "\$@"
EOF
}

restart() { # restart UNIT SCOPE KILL_S: end the process; its unit says Restart=always and starts the new one
    use_scope "$1" "$2"
    old=$(main_pid)
    [ "$old" != 0 ] || exit $NOT_RUNNING
    kill -TERM "$old" 2>/dev/null || true
    left=$(($3 * 5))
    while [ "$(main_pid)" = "$old" ]; do
        if [ $left -le 0 ]; then
            kill -KILL "$old" 2>/dev/null || true
            left=50
        fi
        left=$((left - 1))
        sleep 0.2
    done
    left=150
    while [ "$(main_pid)" = 0 ]; do
        [ $left -gt 0 ] || exit $NOT_RUNNING
        left=$((left - 1))
        sleep 0.2
    done
    rm -f "$root/restart_pending"
}

user_unit() { # user_unit UNIT TEXT
    use_scope "$1" user
    printf '%s' "$2" | put "${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user/$unit" 644
    sctl daemon-reload
    sctl enable --quiet "$unit"
    sctl start "$unit"
}
start_user_unit() { # start_user_unit UNIT
    use_scope "$1" user
    sctl restart "$unit"
    rm -f "$root/restart_pending"
}

confirm() { # confirm ID UNIT SCOPE TIMEOUT_S PROBE: the unit runs this release and answers
    use_scope "$2" "$3"
    here=$root/releases/$1
    until=$(($(uptime_s) + $4))
    while :; do
        pid=$(main_pid)
        cwd=$(readlink "/proc/$pid/cwd" 2>/dev/null || true)
        if [ "$pid" != 0 ] && [ "${cwd##*/releases/}" = "$1" ] && "$here/venv/bin/python" -I -c "$5" >"$here/probe.log" 2>&1; then
            break
        fi
        if [ "$(uptime_s)" -ge $until ]; then
            echo "unit $2: $(sctl is-active "$2" 2>/dev/null), running from ${cwd:-nowhere}; last answer: $(tail -n 1 "$here/probe.log" 2>/dev/null)" >&2
            exit $UNHEALTHY
        fi
        sleep 0.5
    done
    : | put "$here/confirmed" 600
    note "confirm" "$1"
}

restarted() { rm -f "$root/restart_pending"; }

journal() { # journal UNIT SCOPE LINES
    use_scope "$1" "$2"
    if [ "$2" = user ]; then journalctl --user-unit "$1" -n "$3" --no-pager -o short-iso; else journalctl -u "$1" -n "$3" --no-pager -o short-iso; fi
}

prune() { # prune: keep-list of releases, bundles and blobs as `release ID`, `bundle ID`, `blob SHA256` words in pairs
    keep=" "
    while [ $# -gt 0 ]; do
        keep="$keep$1/$2 "
        shift 2
    done
    cd "$root"
    now=$(readlink current || true)
    for path in releases/* bundles/* blobs/* parts/* engines/*; do
        [ -e "$path" ] || continue
        [ "$path" = "$now" ] && continue
        case $path in
            releases/*) kind=release name=${path#releases/} ;;
            bundles/*) kind=bundle name=${path#bundles/} ;;
            blobs/*) kind=blob name=${path#blobs/} ;;
            engines/*) kind=engine name=${path#engines/} name=${name%%.*} ;;
            *) kind=part name=- ;;
        esac
        case $keep in *" $kind/$name "*) continue ;; esac
        case $path in engines/*.*) ;; engines/*) rm -f "cache/engines/$(cut -d' ' -f1 "$path")" ;; esac
        rm -rf "$path"
    done
    rm -rf bundles/.*.new
}

# --- keys --------------------------------------------------------------------------------------------------

is_key() { case $1 in *[!0-9a-zA-Z.:+=^!/*?\&\<\>\(\)@%\$#{}\[\]-]*) return 1 ;; *) [ ${#1} -eq 40 ] ;; esac; }

make_key() { # make_key NAME RELEASE SCRIPT: the script makes the pair and prints the public half as its last line
    [ -s "$root/keys/$1.pub" ] && return
    cd "$root/releases/$2"
    made=$(sh -c "$3" key "$root" | tail -n 1)
    is_key "$made" || fail "the key command printed no public key: $made"
    echo "$made" | put "$root/keys/$1.pub" 644
}
rotate_key() { # rotate_key NAME SCRIPT: as make_key, for a pair that is there
    : | put "$root/restart_pending" 600
    made=$(with_current "$2" | tail -n 1)
    is_key "$made" || fail "the key command printed no public key: $made"
    echo "$made" | put "$root/keys/$1.pub" 644
}
public_key() { cat "$root/keys/device.pub" "$root/keys/service.pub" 2>/dev/null | head -n 1; }

pin() { # pin SERVICE PUBLIC_KEY ADDRESS
    is_key "$2" || fail "the public key of service $1 is not known yet: deploy its device first"
    [ "$(cat "$root/keys/services/$1.pub" 2>/dev/null)" = "$(printf '%s\n%s' "$2" "$3")" ] && return
    # a process that runs has read the old one
    [ ! -e "$root/current" ] || : | put "$root/restart_pending" 600
    printf '%s\n%s\n' "$2" "$3" | put "$root/keys/services/$1.pub" 644
}
with_current() { # with_current SCRIPT ARGUMENT...: in the current release, or the newest complete one
    here=$root/current
    [ -e "$here/complete" ] || here=$(ls -dt "$root"/releases/*/complete 2>/dev/null | head -n 1 | xargs -r dirname)
    [ -n "$here" ] || fail "no release on this device yet: deploy it first"
    cd "$here"
    text=$1
    shift
    sh -c "$text" with "$root" "$@"
}
trust() { with_current "$@"; }   # trust SCRIPT DEVICE PUBLIC_KEY
untrust() { with_current "$@"; } # untrust SCRIPT DEVICE

# --- main --------------------------------------------------------------------------------------------------

case $verb in
    lease_take | lease_break) ;;
    lease_beat | lease_drop | journal | chunk_hashes | engine_state | public_key | trust | untrust) ;;
    *) lease_ours || exit $LEASE_LOST ;;
esac
"$verb" "$@"
