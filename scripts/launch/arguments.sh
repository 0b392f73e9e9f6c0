# shellcheck shell=bash
# Errors, quoting of commands and checks of arguments for gke.sh and tpu_pod.sh. Source it.

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
