#!/usr/bin/env bash
# Trains on Cloud TPU VMs: one slice or several. Asks for them as a queued resource, or takes the
# ones that are there, copies HEAD, installs, runs on all workers, and shows the console of the run.
#
# The run is detached on its hosts: when the connection breaks, `up` again finds it running and
# only watches. A command that stays in the foreground would be started a second time by gcloud's
# own retries, and not at all beyond its 64 connections.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: tpu_pod.sh up|tail|stop|delete --name NAME --zone ZONE [options] [-- arguments of train.py]

  up      make the slices or take those that are there, run, and watch until the run ends
  tail    follow the console of process 0
  stop    SIGTERM to all: they save at the same step; `up` with the same arguments goes on
  delete  delete the slices

  --accelerator TYPE  of one slice: v5litepod-16, v5p-16, v6e-16, ... (up)
  --slices N          joined by the data-center network; give mesh.dcn_dp=N, too (1)
  --spot              cheaper, and may be taken away
  --restarts N        how often to start all again after a failure; slices that were preempted or
                      terminated are then deleted and made anew (0: never)
  --setup COMMAND     run on every host before the installation, to mount the shared run.dir
  --extras LIST       of pyproject.toml (tpu)
  --runtime VERSION   of the TPU software (by --accelerator)
  --project PROJECT   (that of gcloud)
  --dry-run[=STATE]   print every command and execute none, as if the queued resource were in
                      STATE: NONE (if none is given), ACTIVE, SUSPENDED, ...

Exit codes: 0 done, 2 bad input, 75 stopped and resumable, else that of the last try.
EOF
}

die() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

# Prints a command as a shell reads it.
show() {
  local word line="" escaped="'\\''"
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_./:=,@%+~-]+$ ]] || word="'${word//\'/"$escaped"}'"
    line+=" $word"
  done
  printf '%s\n' "${line# }"
}

run() {
  show "$@" >&"$shown"
  [[ $dry ]] || "$@"
}

queued() {
  run gcloud compute tpus queued-resources "$@" "${where[@]}"
}

on_all() {
  queued ssh "$name" --node=all --worker=all --command="$1"
}

# Prints what a question is answered. Over days one in a while gets no answer: that ends no run.
ask() {
  local answer seconds
  for seconds in 10 30 60 120 300; do
    if answer=$("$@"); then
      printf '%s\n' "$answer"
      return
    fi
    say "no answer; asked again in $seconds s"
    sleep "$seconds"
  done
  "$@"
}

# Sets state: what the queue says, NONE, or LOST when a slice is gone behind its back.
look() {
  local queue=(gcloud compute tpus queued-resources list "${where[@]}"
    --filter="name ~ /$name\$" --format="value(state.state)")
  local nodes=(gcloud compute tpus tpu-vm list "${where[@]}"
    --filter="name ~ /$name(-[0-9]+)?\$" --format="value(state)")
  local states
  if [[ $dry ]]; then
    show "${queue[@]}"
    [[ $state != ACTIVE ]] || show "${nodes[@]}"
    return
  fi
  state=$(ask "${queue[@]}")
  state=${state:-NONE}
  if [[ $state == ACTIVE ]]; then
    states=$(ask "${nodes[@]}")
    [[ ! $states =~ PREEMPTED|TERMINATED ]] || state=LOST
  fi
}

# Returns when all slices are there.
ready() {
  local nodes=(--node-id="$name")
  ((slices == 1)) || nodes=(--node-count="$slices" --node-prefix="$name")
  [[ ! $spot ]] || nodes+=(--spot)
  while true; do
    look
    [[ $state != ACTIVE ]] || return 0
    say "$name is $state"
    case $state in
      NONE)
        queued create "$name" "${nodes[@]}" --accelerator-type="$accelerator" \
          --runtime-version="$runtime"
        state=ACTIVE
        ;;
      SUSPENDED | FAILED | LOST)
        if ((restarts == 0)); then
          printf 'error: %s is %s; give --restarts N to delete it and make it anew\n' \
            "$name" "$state" >&2
          exit 1
        fi
        queued delete "$name" --force
        state=NONE
        ;;
      *)
        [[ $dry ]] || sleep 30
        state=ACTIVE
        ;;
    esac
  done
}

say() {
  printf '# %s\n' "$1" >&"$shown"
}

up() {
  local tries=0 code
  # Once: a restart goes on with the code that it began with.
  run mkdir -p .cache
  run git archive --format=tar.gz --output="$archive" HEAD
  [[ $dry ]] || git diff --quiet HEAD || say "changes that are not committed are not copied"
  while true; do
    ready
    code=0
    queued scp "$archive" "$name:torus.tar.gz" --node=all --worker=all &&
      on_all "$launch" && on_all "$watch" || code=$?
    if [[ $dry ]]; then
      say "0, 2 and 75 end here; after any other exit code all of this again, $restarts times"
      return
    fi
    say "exit code $code"
    if [[ $code =~ ^(0|2|75)$ ]] || ((tries++ >= restarts)); then
      exit "$code"
    fi
    sleep 30
  done
}

((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) ||
  die "this is bash $BASH_VERSION; run it with bash 4.4 or newer"
cd "${BASH_SOURCE[0]%/*}/../.."
action="" name="" zone="" project="" accelerator="" runtime="" setup=":" extras=tpu spot="" dry=""
slices=1 restarts=0 state=NONE shown=2 archive=.cache/torus.tar.gz train=()
while (($#)); do
  case $1 in
    up | tail | stop | delete) action=$1 ;;
    --name | --zone | --project | --accelerator | --runtime | --setup | --extras | --slices | --restarts)
      (($# > 1)) || die "$1 needs a value; see --help"
      printf -v "${1#--}" %s "$2"
      shift
      ;;
    --spot) spot=1 ;;
    --dry-run) dry=1 ;;
    --dry-run=*) dry=1 state=${1#*=} ;;
    --help)
      usage
      exit
      ;;
    --)
      shift
      train=("$@")
      break
      ;;
    *) die "$1 is not known; see --help, and give arguments of train.py after --" ;;
  esac
  shift
done
[[ $action ]] || die "say what to do: up, tail, stop or delete; see --help"
[[ $name =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] ||
  die "--name=$name is not a name of small letters, digits and -, up to 40; give another"
[[ $zone ]] || die "--zone is missing; give one that has TPUs, like us-west4-a"
[[ $slices =~ ^[1-9][0-9]*$ ]] || die "--slices=$slices is not a number above 0; give 1 or more"
[[ $restarts =~ ^[0-9]+$ ]] || die "--restarts=$restarts is not a number; give 0 or more"
where=(--zone="$zone" --quiet)
[[ ! $project ]] || where+=(--project="$project")
[[ ! $dry ]] || shown=1

# On a host: torus/ is the code, .log the console, .pid the shell around train.py, .code its end,
# .stop says that the end was asked for. ~ is that of the host.
# shellcheck disable=SC2088,SC2016
watch='(while [ ! -e ~/torus.code ] && kill -0 "$(cat ~/torus.pid)"; do sleep 1; done) &
tail -n 20 -f --pid="$!" ~/torus.log
code=$(cat ~/torus.code || echo 76) # no code: the host went down
if [ "$code" = 75 ] && [ ! -e ~/torus.stop ]; then code=76; fi
exit "$code"'

case $action in
  up)
    if [[ ! $runtime ]]; then
      case $accelerator in
        v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
        v5p-*) runtime=v2-alpha-tpuv5 ;;
        v6e-*) runtime=v2-alpha-tpuv6e ;;
        v[234]-*) runtime=tpu-ubuntu2204-base ;;
        *) die "--accelerator=$accelerator is no TPU VM; give one like v5litepod-16, or --runtime" ;;
      esac
    fi
    [[ " ${train[*]-} " == *" --config "* || " ${train[*]-}" == *" --config="* ]] ||
      die "train.py needs --config; give it after --"
    # Python comes from uv: the TPU software's own is older than 3.11.
    launch="set -eu
if [ -e ~/torus.pid ] && [ ! -e ~/torus.code ] && kill -0 \"\$(cat ~/torus.pid)\"; then exit 0; fi
$setup
mkdir -p ~/torus
find ~/torus -mindepth 1 -maxdepth 1 ! -name .cache -exec rm -rf {} +
tar -xzf ~/torus.tar.gz -C ~/torus
cd ~/torus
python3 -m pip install --quiet --user uv
[ -x ~/venv/bin/python ] || ~/.local/bin/uv venv --quiet --python 3.12 ~/venv
~/.local/bin/uv pip install --quiet --python ~/venv/bin/python -e '.[$extras]'
rm -f ~/torus.code ~/torus.stop
(
  trap '' HUP
  code=0
  ~/venv/bin/python $(show train.py --distributed "${train[@]}") || code=\$?
  echo \"\$code\" > ~/torus.code
) > ~/torus.log 2>&1 < /dev/null &
echo \"\$!\" > ~/torus.pid"
    up
    ;;
  tail)
    queued ssh "$name" --node=0 --worker=0 --command='tail -n 100 -F torus.log'
    ;;
  stop)
    # shellcheck disable=SC2016
    on_all '[ -e ~/torus.stop ] || { touch ~/torus.stop; pkill -TERM -P "$(cat ~/torus.pid)"; }'
    on_all "$watch"
    ;;
  delete)
    queued delete "$name" --force
    ;;
esac
