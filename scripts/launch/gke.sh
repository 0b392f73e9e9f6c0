#!/usr/bin/env bash
# Trains on slices of TPUs under GKE, as a JobSet (gke_jobset.yaml), or through XPK.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: gke.sh build|up|tail|delete [options] [-- arguments of train.py]

  build   make the image from this folder, and push it
  up      start the JobSet; the run goes on from its newest checkpoint
  tail    follow the console of process 0
  delete  SIGTERM to all, which save at the same step; then delete the JobSet

  --name NAME         of the JobSet (up, tail, delete)
  --image IMAGE       with its registry and tag (build, up)
  --cluster CLUSTER   --location ZONE_OR_REGION  --project PROJECT  --namespace NAMESPACE (default)
  --accelerator TYPE  cloud.google.com/gke-tpu-accelerator: tpu-v5-lite-podslice, tpu-v5p-slice, ...
  --topology AxB[xC]  of one slice
  --chips N           per host (4)
  --slices N          joined by the data-center network; give mesh.dcn_dp=N, too (1)
  --pvc CLAIM         ReadWriteMany, mounted at /shared: put run.dir there
  --restarts N        how often to start all again after a failure (20)
  --xpk               up and delete by XPK; --tpu-type TYPE instead of accelerator, topology, chips;
                      the volume comes from `xpk storage attach`
  --dry-run           print every command and execute none
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
  if [[ $dry ]]; then show "$@"; else show "$@" >&2 && "$@"; fi
}

# Every option named here must have been given.
need() {
  local option
  for option in "$@"; do
    [[ ${!option} ]] || die "$action needs --${option//_/-}; see --help"
  done
}

# A list that is JSON, and so YAML.
list() {
  local word line=""
  for word in "$@"; do
    word=${word//\\/\\\\}
    line+=", \"${word//\"/\\\"}\""
  done
  printf '[%s]' "${line#, }"
}

manifest() {
  local text hosts=1 size
  for size in ${topology//x/ }; do
    hosts=$((hosts * size))
  done
  ((hosts % chips == 0)) ||
    die "--topology=$topology has $hosts chips, which hosts of --chips=$chips do not share evenly; give --chips"
  hosts=$((hosts / chips))
  text=$(< scripts/launch/gke_jobset.yaml)
  text=${text//__NAME__/"$name"}
  text=${text//__NAMESPACE__/"$namespace"}
  text=${text//__RESTARTS__/"$restarts"}
  text=${text//__SLICES__/"$slices"}
  text=${text//__HOSTS__/"$hosts"}
  text=${text//__ACCELERATOR__/"$accelerator"}
  text=${text//__TOPOLOGY__/"$topology"}
  text=${text//__IMAGE__/"$image"}
  text=${text//__CHIPS__/"$chips"}
  text=${text//__PVC__/"$pvc"}
  text=${text//__ARGS__/"$(list --distributed "${train[@]}")"}
  printf '%s\n' "$text"
}

connect() {
  run gcloud container clusters get-credentials "$cluster" "${place[@]}"
}

up() {
  local filled
  [[ " ${train[*]-} " == *" --config "* || " ${train[*]-}" == *" --config="* ]] ||
    die "train.py needs --config; give it after --"
  [[ ${train[*]} != *$'\n'* ]] || die "an argument of train.py has a line break; take it out"
  if [[ $xpk ]]; then
    need name image cluster location project tpu_type
    # XPK's own default starts again after 42 and 127 to 255 alone.
    run xpk workload create --workload="$name" "${xpk_place[@]}" --tpu-type="$tpu_type" \
      --num-slices="$slices" --docker-image="$image" --max-restarts="$restarts" \
      --restart-on-exit-codes=1,75,76 --termination-grace-period-seconds=300 \
      --command="$(show python train.py --distributed "${train[@]}")"
    return
  fi
  need name image cluster location accelerator topology pvc
  filled=$(manifest)
  connect
  if [[ $dry ]]; then
    printf "kubectl apply --filename=- <<'EOF'\n%s\nEOF\n" "$filled"
  else
    kubectl apply --filename=- <<< "$filled"
  fi
}

((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) ||
  die "this is bash $BASH_VERSION; run it with bash 4.4 or newer"
cd "${BASH_SOURCE[0]%/*}/../.."
action="" name="" image="" cluster="" location="" project="" accelerator="" topology="" pvc=""
tpu_type="" xpk="" dry="" namespace=default chips=4 slices=1 restarts=20 train=()
while (($#)); do
  case $1 in
    build | up | tail | delete) action=$1 ;;
    --name | --image | --cluster | --location | --project | --namespace | --accelerator | \
      --topology | --chips | --slices | --pvc | --restarts | --tpu-type)
      (($# > 1)) || die "$1 needs a value; see --help"
      option=${1#--}
      printf -v "${option//-/_}" %s "$2"
      shift
      ;;
    --xpk) xpk=1 ;;
    --dry-run) dry=1 ;;
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
[[ $action ]] || die "say what to do: build, up, tail or delete; see --help"
# What goes into the YAML has no character that means something there.
for option in name namespace pvc; do
  [[ ${!option} =~ ^([a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?)?$ ]] ||
    die "--$option=${!option} is not a name of small letters, digits and -, up to 40; give another"
done
for option in chips slices; do
  [[ ${!option} =~ ^[1-9][0-9]*$ ]] || die "--$option=${!option} is not a number above 0; give 1 or more"
done
[[ $restarts =~ ^[0-9]+$ ]] || die "--restarts=$restarts is not a number; give 0 or more"
[[ $topology =~ ^([1-9][0-9]*(x[1-9][0-9]*){1,2})?$ ]] ||
  die "--topology=$topology is not like 4x4 or 2x2x2; give that of one slice"
[[ $image$accelerator =~ ^[A-Za-z0-9_./:@-]*$ ]] ||
  die "--image=$image or --accelerator=$accelerator has a strange character; give another"
place=(--location="$location")
[[ ! $project ]] || place+=(--project="$project")
xpk_place=(--cluster="$cluster" --zone="$location" --project="$project")
case $action in
  build)
    need image
    run docker build --platform=linux/amd64 --build-arg=ACCELERATOR=tpu --tag="$image" .
    run docker push "$image"
    ;;
  up) up ;;
  tail)
    need name cluster location
    connect
    process=jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0
    run kubectl logs --follow --tail=100 --namespace="$namespace" \
      --selector="jobset.sigs.k8s.io/jobset-name=$name,$process"
    ;;
  delete)
    need name cluster location
    if [[ $xpk ]]; then
      need project
      run xpk workload delete --workload="$name" "${xpk_place[@]}" --force
    else
      connect
      run kubectl delete jobset "$name" --namespace="$namespace"
    fi
    ;;
esac
