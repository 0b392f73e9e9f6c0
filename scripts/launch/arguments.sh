# shellcheck shell=bash
# Errors, quoting of commands, tokens and checks of arguments for the launch scripts. Source it.

# Print an error and exit with the code for bad input.
die() {
  printf 'error: %s\n' "$1" >&2
  exit 2
}

# Print a command as a shell reads it.
show() {
  local word line="" escaped="'\\''"
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_./:=,@%+~-]+$ ]] || word="'${word//\'/"$escaped"}'"
    line+=" $word"
  done
  printf '%s\n' "${line# }"
}

# Check that the bash that runs this is new enough.
check_bash() {
  ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) ||
    die "this is bash $BASH_VERSION; run it with bash 4.4 or newer"
}

# Check that the arguments of train.py contain --config.
check_config() {
  [[ " $* " == *" --config "* || " $*" == *" --config="* ]] ||
    die "train.py needs --config; give it after --"
}

# Check that the variable named by each argument, an option without dashes, is 1 or more.
check_positive() {
  local option
  for option in "$@"; do
    [[ ${!option} =~ ^[1-9][0-9]*$ ]] ||
      die "--$option=${!option} is not a number above 0; give 1 or more"
  done
}

check_restarts() {
  [[ $1 =~ ^[0-9]+$ ]] || die "--restarts=$1 is not a number; give 0 or more"
}

# Print the configuration files among arguments, one per line.
config_files() {
  local word previous=""
  for word in "$@"; do
    if [[ $previous == --config ]]; then
      printf '%s\n' "$word"
    elif [[ $word == --config=* ]]; then
      printf '%s\n' "${word#*=}"
    fi
    previous=$word
  done
}

# Check that a restart would continue the run: checkpoint.resume=never moves it aside each time.
# check_resume RESTARTS arguments of train.py
check_resume() {
  local restarts=$1 word file resume="" never=$'(^|\n)[^#\n]*resume: *["\']?never'
  shift
  while read -r file; do
    [[ ! -r $file || ! $(< "$file") =~ $never ]] || resume=never
  done < <(config_files "$@")
  for word in "$@"; do
    [[ $word != checkpoint.resume=* ]] || resume=${word#*=}
  done
  ((restarts == 0)) || [[ $resume != *never* ]] ||
    die "checkpoint.resume=never with restarts would start over each time; give --restarts 0, or leave it out"
}

# Prints a new token of a run, 256 random bits. The processes of one attempt know each other by it.
# It travels in files and environments: every user of a machine sees its command lines.
# shellcheck disable=SC2034
new_token='od -An -v -N32 -tx1 /dev/urandom | tr -d "[:space:]"'

# Ask scripts/plan.py before anything is created, and exit with 2 if it refuses: the configuration is
# wrong, the mesh has another number of devices, or (unless --no-plan) the step does not fit. On a
# machine that cannot run it, say what was not checked. A dry run prints the command, and checks the
# configuration and the number of devices only. Reads dry and no_plan.
# ask_planner TOPOLOGY PYTHON... -- arguments of train.py
ask_planner() {
  local topology=$1 planner=() words=() skip="" code=0
  shift
  while [[ $1 != -- ]]; do
    planner+=("$1")
    shift
  done
  shift
  while (($#)); do
    case $1 in
      --config | --config=*) words+=("$1") ;;
      --coordinator | --num-processes | --process-id) skip=1 ;;
      --*) ;;
      *)
        [[ $skip ]] || words+=("$1")
        skip=""
        ;;
    esac
    shift
  done
  case $topology in
    v[23]-* | tpu-v[23]-* | tpu7x*)
      printf '# not checked: scripts/plan.py has no model of %s\n' "$topology" >&2
      return
      ;;
  esac
  words=(scripts/plan.py "${words[@]}" --topology "$topology")
  [[ ! $no_plan ]] || words+=(--check-mesh)
  if [[ $dry ]]; then
    show "${planner[@]}" "${words[@]}"
    [[ $no_plan ]] || words+=(--check-mesh)
  fi
  "${planner[@]}" -c "$can_plan" 2> /dev/null || code=$?
  if ((code == 3)) && [[ ! $dry && ! $no_plan && $topology =~ ^(v|tpu) ]]; then
    printf '# memory is not checked: this machine has no libtpu (pip install -e ".[plan]")\n' >&2
    words+=(--check-mesh)
  elif ((code != 0 && code != 3)); then
    printf '# not checked: %s cannot import Torus (pip install -e .); the hosts check the configuration\n' \
      "${planner[-1]}" >&2
    return
  fi
  [[ $dry ]] || show "${planner[@]}" "${words[@]}" >&2
  code=0
  "${planner[@]}" "${words[@]}" >&2 || code=$?
  ((code != 1)) || [[ $no_plan ]] || printf 'to launch all the same, give --no-plan\n' >&2
  ((code == 0)) || exit 2
}

# Exit codes: 0 all there, 3 no libtpu, 1 not even the packages of Torus.
can_plan='import importlib.util as u, sys, configs.schema; sys.exit(0 if u.find_spec("libtpu") else 3)'
