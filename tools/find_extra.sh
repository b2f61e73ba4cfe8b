#!/bin/sh
# Prints the extra that this machine's NVIDIA driver can run, cuda13 or cuda12, or nothing if it can run neither.
set -u

command -v nvidia-smi >/dev/null 2>&1 || exit 0
version=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)
major=${version%%.*}
case $major in
    '' | *[!0-9]*) ;;                       # no GPU answered
    *)
        if [ "$major" -ge 580 ]; then       # the first driver of CUDA 13
            echo cuda13
        elif [ "$major" -ge 525 ]; then     # the first driver of CUDA 12
            echo cuda12
        else
            echo "The NVIDIA driver $version is older than CUDA 12 needs (525): installing for the CPU." >&2
        fi
        ;;
esac
