#!/bin/sh
# The flags that make DENSE its authors' code (zj-jayzhang/DENSE, the README's settings for CIFAR), for the label $1 of
# a comparison, or for `fedstill run dense` without one: fedstill run dense $(sh reproduce/dense/published.sh)
PREFIX=--${1:+$1.}
for FLAG in "local.batch-size 128" "local.epochs 400" "local-view crop_flip" "local-norm frozen-after-first" \
    "generation.batch-size 256" "generation.bn 0" "generation.div 1" "generation.view crop_flip" "generation.fresh" \
    "generation.keep-lowest" "student.lr 0.005" "student.batch-size 256" "student-view crop_flip" "temperature 20" "pool 200"; do
    printf '%s%s ' "$PREFIX" "$FLAG"
done
