#!/usr/bin/env bash
# Train on one or several slices of Cloud TPU VMs: create them as a queued resource or reuse the
# existing ones, copy HEAD, install it, run it on all workers and follow the console of process 0.
#
# The run is detached on its hosts. When the connection breaks, `up` again finds it running and only
# follows it. A command in the foreground would be started twice by the retries of gcloud, and would
# not start at all beyond the 64 connections that gcloud opens.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: tpu_pod.sh up|tail|stop|delete --name NAME --zone ZONE [options] [-- arguments of train.py]

  up      create or reuse the slices, run, and follow the console until the run ends
  tail    follow the console of process 0
  stop    send SIGTERM: all processes save at the same step; `up` resumes
  delete  delete the slices

  --accelerator TYPE  type of one slice: v5litepod-16, v5p-16, v6e-16, ... (up)
  --slices N          number of slices; give mesh.dcn_dp=N, too (1)
  --spot              use spot capacity: cheaper, may be preempted
  --restarts N        how often to restart all processes after a failure; slices that were
                      preempted or terminated are deleted and created again (0)
  --setup COMMAND     command for every host before the installation, to mount the shared run.dir
  --extras LIST       extras of pyproject.toml to install (tpu,data,gcs)
  --runtime VERSION   version of the TPU software (default by --accelerator)
  --project PROJECT   project of Google Cloud (default of gcloud)
  --no-plan           do not compile the step first to see whether it fits; the configuration and the
                      number of chips are checked all the same (up)
  --dry-run[=STATE]   print every command and run none, except the check of the configuration and
                      the number of chips; as if the queued resource were in STATE: NONE (default),
                      ACTIVE, SUSPENDED, ...

Exit codes: 0 done, 2 bad input, 75 stopped and resumable, 77 a device computes wrongly, else that
of the last attempt.
EOF
}

cd "${BASH_SOURCE[0]%/*}/../.."
source scripts/launch/arguments.sh

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

# Print the output of a query, and repeat it when it fails: over days some do.
ask() {
  local answer seconds
  for seconds in 10 30 60 120 300; do
    if answer=$("$@"); then
      printf '%s\n' "$answer"
      return
    fi
    say "no answer; trying again in $seconds s"
    sleep "$seconds"
  done
  "$@"
}

# Set state to that of the queued resource, NONE, or LOST if a slice of an ACTIVE one is gone.
look() {
  local queue=(gcloud compute tpus queued-resources list "${where[@]}"
    --filter="name ~ /$name\$" --format="value(state.state)")
  local states number=""
  ((slices == 1)) || number="-[0-9]+"
  local nodes=(gcloud compute tpus tpu-vm list "${where[@]}"
    --filter="name ~ /$name$number\$" --format="value(state)")
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

# Wait until all slices are active; create them if needed.
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
          printf 'error: %s is %s; give --restarts N to delete and create it again\n' \
            "$name" "$state" >&2
          exit 1
        fi
        if [[ $state == FAILED && ! $dry ]]; then
          if ((++failures > restarts)); then
            printf 'error: %s is FAILED %s times; gcloud compute tpus queued-resources describe %s says why\n' \
              "$name" "$failures" "$name" >&2
            exit 1
          fi
          sleep 30
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

# The hosts get the files of the last commit, and the planner reads those of the working tree.
check_committed() {
  local file
  while read -r file; do
    if [[ $file != /* ]] &&
      ! { git cat-file -e "HEAD:$file" 2>/dev/null && git diff --quiet HEAD -- "$file"; }; then
      die "$file is not committed as it is, and the hosts get committed files; commit it"
    fi
  done < <(config_files "$@")
}

up() {
  local tries=0 code
  [[ $dry ]] || check_committed "${train[@]}"
  # Once, so that a restart runs the same code.
  run mkdir -p .cache
  run git archive --format=tar.gz --output="$archive" HEAD
  [[ $dry ]] || git diff --quiet HEAD || say "uncommitted changes are not copied"
  while true; do
    ready
    code=0
    run bash -c "umask 077; rm -f $token; $new_token > $token"
    if queued scp "$archive" "$token" "$name:." --node=all --worker=all && run rm -f "$token" &&
      on_all "$launch"; then
      on_all "$watch" || code=$?
    else
      code=1 # of the installation, and none of train.py
    fi
    if [[ $dry ]]; then
      say "exit codes 0, 2, 75 and 77 end here; any other repeats all of this, $restarts times"
      return
    fi
    say "exit code $code"
    if [[ $code =~ ^(0|2|75|77)$ ]] || ((tries++ >= restarts)); then
      exit "$code"
    fi
    sleep 30
  done
}

check_bash
action="" name="" zone="" project="" accelerator="" runtime="" setup=":" extras=tpu,data,gcs spot="" dry=""
no_plan="" slices=1 restarts=0 failures=0 state=NONE shown=2 train=()
archive=.cache/torus.tar.gz token=.cache/torus.token
while (($#)); do
  case $1 in
    up | tail | stop | delete) action=$1 ;;
    --name | --zone | --project | --accelerator | --runtime | --setup | --extras | --slices | --restarts)
      (($# > 1)) || die "$1 needs a value; see --help"
      printf -v "${1#--}" %s "$2"
      shift
      ;;
    --spot) spot=1 ;;
    --no-plan) no_plan=1 ;;
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
    *) die "$1 is no known option; see --help, and give arguments of train.py after --" ;;
  esac
  shift
done
[[ $action ]] || die "give an action: up, tail, stop or delete; see --help"
[[ $name =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] ||
  die "--name=$name is not a name; give up to 40 lowercase letters, digits and dashes"
[[ $zone ]] || die "--zone is missing; give a zone with TPUs, like us-west4-a"
check_positive slices
check_restarts "$restarts"
where=(--zone="$zone" --quiet)
[[ ! $project ]] || where+=(--project="$project")
[[ ! $dry ]] || shown=1

# Files in the home folder of a host: torus/ is the code, torus.log the console, torus.pid the shell
# around train.py, torus.code its exit code; torus.stop says that a stop was requested; torus.token
# is the secret of the attempt that is about to start.
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
        *) die "--accelerator=$accelerator is no known type of TPU VM; give one like v5litepod-16, or --runtime" ;;
      esac
    fi
    check_config "${train[@]}"
    check_resume "$restarts" "${train[@]}"
    # Python comes from uv: the TPU software's own is older than 3.11.
    launch="set -eu
if [ -e ~/torus.pid ] && [ ! -e ~/torus.code ] && kill -0 \"\$(cat ~/torus.pid)\"; then
  rm -f ~/torus.token
  exit 0
fi
token=\$(cat ~/torus.token)
$setup
mkdir -p ~/torus
# The code of before. Other files stay: run.dir may be here, on the disk of the host or mounted.
tar -tzf ~/torus.tar.gz | cut -d/ -f1 | sort -u | (cd ~/torus && xargs -d '\\n' rm -rf)
tar -xzf ~/torus.tar.gz -C ~/torus
cd ~/torus
python3 -m pip install --quiet --user uv
[ -x ~/venv/bin/python ] || ~/.local/bin/uv venv --quiet --python 3.12 ~/venv
~/.local/bin/uv pip install --quiet --python ~/venv/bin/python -c constraints/python3.12.txt -e '.[$extras]'
rm -f ~/torus.code ~/torus.stop
(
  trap '' HUP
  code=0
  TORUS_RUN_TOKEN=\$token ~/venv/bin/python $(show train.py --distributed "${train[@]}") || code=\$?
  echo \"\$code\" > ~/torus.code
) > ~/torus.log 2>&1 < /dev/null &
echo \"\$!\" > ~/torus.pid
rm -f ~/torus.token"
    copies=""
    ((slices == 1)) || copies="*$slices"
    ask_planner "$accelerator$copies" python3 -- "${train[@]}"
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
