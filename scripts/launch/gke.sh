#!/usr/bin/env bash
# Train on TPU slices under GKE, as a JobSet (gke_jobset.yaml) or through XPK.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: gke.sh build|prepare|up|tail|delete [options] [-- arguments of train.py or prepare_data.py]

  build   build the image from this folder, and push it
  prepare tokenize the data on a node without TPUs; arguments are those of scripts/prepare_data.py
  up      start the JobSet; the run resumes from its newest checkpoint
  tail    follow the console of process 0
  delete  send SIGTERM, so that all processes save at the same step; then delete the JobSet, and
          what `prepare` has left

  --name NAME         name of the JobSet (prepare, up, tail, delete)
  --image IMAGE       image with its registry and tag (build, prepare, up)
  --extras LIST       extras of pyproject.toml in the image besides tpu (data,gcs) (build)
  --cluster CLUSTER   --location ZONE_OR_REGION  --project PROJECT  --namespace NAMESPACE (default)
  --accelerator TYPE  cloud.google.com/gke-tpu-accelerator: tpu-v5-lite-podslice, tpu-v5p-slice, ...
  --topology AxB[xC]  topology of one slice
  --chips N           chips per host (4)
  --slices N          number of slices; give mesh.dcn_dp=N, too (1)
  --nodes N           pods of 4 CPUs and 16 GiB that tokenize, as one Ray cluster; the image needs
                      the extra ray (1: one pod without Ray) (prepare)
  --pvc CLAIM         volume claim (ReadWriteMany), mounted at /shared: put run.dir there
  --root              run as root, still without privileges: if the nodes give their TPUs, or the
                      volume its files, to root alone (prepare, up)
  --restarts N        how often to restart all processes after a failure (20)
  --xpk               use XPK for up and delete; give --tpu-type TYPE instead of accelerator,
                      topology and chips; attach the volume by `xpk storage attach`
  --no-plan           do not compile the step first to see whether it fits; the configuration and the
                      number of chips are checked all the same (up)
  --dry-run           print every command and run none, except the check of the configuration and
                      the number of chips
EOF
}

cd "${BASH_SOURCE[0]%/*}/../.."
source scripts/launch/arguments.sh

run() {
  if [[ $dry ]]; then show "$@"; else show "$@" >&2 && "$@"; fi
}

# Check that every option named here was given.
need() {
  local option
  for option in "$@"; do
    [[ ${!option} ]] || die "$action needs --${option//_/-}; see --help"
  done
}

# Print a list as JSON, which is also YAML.
list() {
  local word line=""
  for word in "$@"; do
    word=${word//\\/\\\\}
    line+=", \"${word//\"/\\\"}\""
  done
  printf '[%s]' "${line#, }"
}

# Print a template with the values that every manifest has.
fill() {
  local text user=1000 non_root=true drop='["ALL"]'
  [[ ! $root ]] || user=0 non_root=false drop='[]' # what the container runtime drops anyway
  text=$(< "scripts/launch/$1")
  shift
  text=${text//__NAME__/"$name"}
  text=${text//__NAMESPACE__/"$namespace"}
  text=${text//__IMAGE__/"$image"}
  text=${text//__PVC__/"$pvc"}
  text=${text//__USER__/"$user"}
  text=${text//__NON_ROOT__/"$non_root"}
  text=${text//__DROP__/"$drop"}
  text=${text//__ARGS__/"$(list "$@")"}
  printf '%s\n' "$text"
}

manifest() {
  local text hosts=1 size host_network=false dns_policy=ClusterFirst
  for size in ${topology//x/ }; do
    hosts=$((hosts * size))
  done
  ((hosts % chips == 0)) ||
    die "--topology=$topology has $hosts chips, which do not divide over hosts of --chips=$chips; give --chips"
  hosts=$((hosts / chips))
  ((slices == 1)) || host_network=true dns_policy=ClusterFirstWithHostNet
  text=$(fill gke_jobset.yaml --distributed "${train[@]}")
  text=${text//__RESTARTS__/"$restarts"}
  text=${text//__SLICES__/"$slices"}
  text=${text//__HOSTS__/"$hosts"}
  text=${text//__ACCELERATOR__/"$accelerator"}
  text=${text//__TOPOLOGY__/"$topology"}
  text=${text//__CHIPS__/"$chips"}
  text=${text//__HOST_NETWORK__/"$host_network"}
  text=${text//__DNS_POLICY__/"$dns_policy"}
  printf '%s\n' "$text"
}

# Create what a manifest describes, with a new secret for __TOKEN__.
apply() {
  if [[ $dry ]]; then
    printf "kubectl apply --filename=- <<'EOF'\n%s\nEOF\n" "${1/__TOKEN__/a-new-secret}"
  else
    kubectl apply --filename=- <<< "${1/__TOKEN__/$(eval "$new_token")}"
  fi
}

# Check that relative paths of configurations are in the image, which has the folder configs/ alone.
check_in_image() {
  local file
  while read -r file; do
    [[ $file == /* || $file == configs/* ]] ||
      die "$file is not in the image; move it to configs/ and build again, or give its path on the volume"
  done < <(config_files "$@")
}

connect() {
  run gcloud container clusters get-credentials "$cluster" "${place[@]}"
}

up() {
  local filled copies="" code=0 ended="" state
  ((slices == 1)) || copies="*$slices"
  check_config "${train[@]}"
  check_in_image "${train[@]}"
  check_resume "$restarts" "${train[@]}"
  [[ ${train[*]} != *$'\n'* ]] || die "an argument of train.py has a line break; remove it"
  if [[ $xpk ]]; then
    need name image cluster location project tpu_type
    ask_planner "$tpu_type$copies" python3 -- "${train[@]}"
    # All attempts of a run have this token: XPK cannot pass on the number of the attempt.
    run mkdir -p .cache
    run bash -c "umask 077; rm -f $variables; echo \"TORUS_RUN_TOKEN=\$($new_token)\" > $variables"
    # By default XPK restarts only after exit codes 42 and 127 to 255.
    run xpk workload create --workload="$name" "${xpk_place[@]}" --tpu-type="$tpu_type" \
      --num-slices="$slices" --docker-image="$image" --env-file="$variables" --max-restarts="$restarts" \
      --restart-on-exit-codes=1,75,76 --termination-grace-period-seconds=300 \
      --command="$(show python train.py --distributed "${train[@]}")" || code=$?
    run rm -f "$variables"
    return "$code"
  fi
  need name image cluster location accelerator topology pvc
  filled=$(manifest)
  ask_planner "$accelerator:$topology$copies" python3 -- "${train[@]}"
  connect
  # One that has ended would stay as it is.
  state=(kubectl get "jobset/$name" --namespace="$namespace" --ignore-not-found
    --output='jsonpath={.status.terminalState}')
  if [[ $dry ]]; then show "${state[@]}"; else ended=$("${state[@]}"); fi
  [[ ! $ended ]] || run kubectl delete "jobset/$name" --namespace="$namespace"
  # A second `up` replaces the secret: the pods that run keep theirs, the next attempt takes it.
  apply "$filled"
}

prepare() {
  local job=job/$name-data made=job/$name-data end=Complete template=gke_prepare.yaml text tries=0
  need name image cluster location pvc
  ((${#train[@]})) || die "give the arguments of scripts/prepare_data.py after --"
  check_in_image "${train[@]}"
  [[ ${train[*]} != *$'\n'* ]] || die "an argument of prepare_data.py has a line break; remove it"
  if ((nodes > 1)); then
    job=job/$name-data-head-0 made=jobset/$name-data end=Completed template=gke_prepare_nodes.yaml
  fi
  connect
  delete_prepared # they cannot be changed
  text=$(fill "$template" "${train[@]}")
  apply "${text//__OTHERS__/$((nodes - 1))}"
  # Fails until the container runs, which may have to wait for a node and for the image.
  until run kubectl logs --follow "$job" --namespace="$namespace"; do
    ((++tries < 90)) || die "$job has not started after 15 minutes; see kubectl describe $job"
    sleep 10
  done
  run kubectl wait "$made" --namespace="$namespace" --for=condition="$end" --timeout=60s
}

# Delete what `prepare` has created, and wait until it is gone. A cluster may know no JobSets.
delete_prepared() {
  local options=(--namespace="$namespace" --ignore-not-found --cascade=foreground)
  run kubectl delete "job/$name-data" "secret/$name-data-token" "${options[@]}"
  run kubectl delete "jobset/$name-data" "${options[@]}" || ((nodes == 1))
}

check_bash
action="" name="" image="" cluster="" location="" project="" accelerator="" topology="" pvc=""
tpu_type="" xpk="" dry="" no_plan="" root="" extras=data,gcs namespace=default chips=4 slices=1 nodes=1 restarts=20 train=()
variables=.cache/torus.env
while (($#)); do
  case $1 in
    build | prepare | up | tail | delete) action=$1 ;;
    --name | --image | --cluster | --location | --project | --namespace | --accelerator | \
      --topology | --chips | --slices | --nodes | --pvc | --restarts | --tpu-type | --extras)
      (($# > 1)) || die "$1 needs a value; see --help"
      option=${1#--}
      printf -v "${option//-/_}" %s "$2"
      shift
      ;;
    --xpk) xpk=1 ;;
    --no-plan) no_plan=1 ;;
    --root) root=1 ;;
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
    *) die "$1 is no known option; see --help, and give arguments of train.py after --" ;;
  esac
  shift
done
[[ $action ]] || die "give an action: build, prepare, up, tail or delete; see --help"
# These values go into the YAML file, so they may have no special characters.
for option in name namespace pvc; do
  [[ ${!option} =~ ^([a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?)?$ ]] ||
    die "--$option=${!option} is not a name; give up to 40 lowercase letters, digits and dashes"
done
check_positive chips slices nodes
check_restarts "$restarts"
[[ $topology =~ ^([1-9][0-9]*(x[1-9][0-9]*){1,2})?$ ]] ||
  die "--topology=$topology is no topology; give that of one slice, like 4x4 or 2x2x2"
[[ $image$accelerator =~ ^[A-Za-z0-9_./:@-]*$ ]] ||
  die "--image=$image or --accelerator=$accelerator has a special character; give another"
place=(--location="$location")
[[ ! $project ]] || place+=(--project="$project")
xpk_place=(--cluster="$cluster" --zone="$location" --project="$project")
case $action in
  build)
    need image
    run docker build --platform=linux/amd64 --build-arg=ACCELERATOR=tpu \
      --build-arg=EXTRAS="$extras" --tag="$image" .
    run docker push "$image"
    ;;
  prepare) prepare ;;
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
      delete_prepared
      run kubectl delete "jobset/$name" "secret/$name-token" --namespace="$namespace"
    fi
    ;;
esac
