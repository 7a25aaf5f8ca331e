#!/bin/sh
# DENSE's tables: [SEEDS="0 1 2"] [METHODS="dense dense-p ..."] [EPOCHS=60] [AUTHORS=1] [RUNS=FOLDER] [MORE="--FLAG ..."]
# sh reproduce/dense/run.sh DATA ALPHA CLIENTS DEVICE SCALE [MODELS]; AUTHORS=1: clients train as in the authors' code
set -eu
DATA=${1:-mnist} ALPHA=${2:-0.3} CLIENTS=${3:-5} DEVICE=${4:-cuda} SCALE=${5:-paper} MODELS=${6:-}
METHODS=${METHODS:-feddf feddf-p fed-dafl fed-dafl-p fed-adi fed-adi-p dense dense-p} # -p: the mean of probabilities, not of logits
case $DATA in
    mnist) MODEL=dense-mnist PUBLIC=fashion_mnist ;;
    fashion_mnist) MODEL=dense-mnist PUBLIC=mnist ;;
    cifar10) MODEL=dense-cnn2 PUBLIC=cifar100 ;;
    svhn) MODEL=dense-cnn2 PUBLIC=cifar10 ;;
    cifar100) MODEL=dense-cnn2:width=256 PUBLIC=cifar10 ;;
    tiny_imagenet) MODEL=resnet18 PUBLIC=cifar100 ;; # neither the paper nor its code names a network
    *) echo "there is no recipe for '$DATA' here" >&2; exit 2 ;;
esac
[ -z "$MODELS" ] || MODEL=resnet18
OUT="${RUNS:-runs/reproduce-dense}/$SCALE-$DATA-$ALPHA-$CLIENTS${EPOCHS:+-$EPOCHS}${AUTHORS:+-authors}"
case $SCALE in small) SCALE=cpu MODEL=dense-mnist ;; esac # with batch norms, a third of the work
EXTRA="" COMPARED=""
case " $METHODS " in *" feddf"*) EXTRA="--public $PUBLIC:unlabeled" ;; esac # nobody else looks at any
for label in $METHODS; do
    method=${label%-p} METHOD=${label%-p} AVERAGE=average CHOSEN=logits
    case $label in dense-published) method=dense-published METHOD=dense EXTRA="$EXTRA $(sh "$(dirname "$0")/published.sh" "$label")" ;; esac
    COMPARED="$COMPARED $label=$METHOD"
    [ "$method" != feddf ] || AVERAGE=distillation.outputs
    [ "$label" = "$method" ] || CHOSEN=probabilities
    EXTRA="$EXTRA --$label.$AVERAGE $CHOSEN"
    case $DATA-$method${AUTHORS:+-authors} in # the code augments CIFAR's images alone
        cifar*-dense-published*) ;; # flags that come later win
        *-dense-published*) EXTRA="$EXTRA --$label.local-view none --$label.student-view flip" ;;
        cifar*-authors) EXTRA="$EXTRA --$label.local-view crop_flip --$label.local-norm frozen-after-first" ;;
        *-authors) EXTRA="$EXTRA --$label.local-norm frozen-after-first" ;;
    esac
    case $SCALE-$method in
        paper-dense-published) ;; # its own 400
        paper-*) EXTRA="$EXTRA --$label.local.epochs 200" ;;
        cpu-*) EXTRA="$EXTRA --$label.local.epochs 20" ;;
    esac
    case $SCALE-$method in
        paper-fed-adi) EXTRA="$EXTRA --$label.inversion.steps 2000" ;;
        cpu-feddf) EXTRA="$EXTRA --$label.distillation.epochs 1" ;;
        cpu-fed-adi) EXTRA="$EXTRA --$label.epochs 6 --$label.inversion.steps 80 --$label.inversion.batch-size 64 --$label.start mean" ;;
        cpu-*) EXTRA="$EXTRA --$label.epochs ${EPOCHS:-15} --$label.generation.steps 8 --$label.generation.batch-size 64 --$label.start mean" ;;
    esac
    case $SCALE-$method in cpu-dense) EXTRA="$EXTRA --$label.generation.ngf 16" ;; esac
done
case $SCALE in
    paper) SEEDS=${SEEDS:-0 1 2} ;;
    cpu) SEEDS=${SEEDS:-0} EXTRA="$EXTRA --limit 8000 --workers 0" ;;
esac
[ -z "$MODELS" ] || EXTRA="$EXTRA --models $MODELS"
# shellcheck disable=SC2086
exec fedstill compare $COMPARED \
    --data "$DATA" --partition "dirichlet-capped:$ALPHA" --clients "$CLIENTS" \
    --model "$MODEL" --device "$DEVICE" --seeds $SEEDS $EXTRA ${MORE:-} --out "$OUT"
